"""What several folders of tests use: real servers, and the published contract as a judge of their answers."""
