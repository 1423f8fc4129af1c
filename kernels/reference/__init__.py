"""What every kernel must compute, in plain torch: the meaning of each operation and the yardstick of its tests."""
