"""The contract: config, build spec, custom ops, graph passes, parity and compilation."""
