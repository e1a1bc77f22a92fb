"""Expert parallelism: dispatch, products, tensor parallelism of experts."""
