"""What a sparse network is and does: SAD, cost, verification, agreement between processes."""
