//! Networks made by plugins.
