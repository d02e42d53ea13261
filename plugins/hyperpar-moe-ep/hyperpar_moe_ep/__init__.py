"""Expert parallelism for hyperpar: tokens travel to the ranks that hold their experts."""
