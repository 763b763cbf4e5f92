//! Facts about this machine, and the node object.
