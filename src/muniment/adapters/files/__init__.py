"""Files and directories, written durably."""
