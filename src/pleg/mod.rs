//! What really runs: one store of observations, refreshed by events and lists.
