//! The kernel: the only room with `unsafe`.
