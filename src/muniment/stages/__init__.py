"""The data path, one verb a module, in this order: accept, ledger, plan, execute, index, commit, recall."""
