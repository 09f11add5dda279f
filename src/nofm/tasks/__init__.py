"""What is learned: a task turns a batch into a loss, and says how good a network is. It knows nothing of sparsity."""
