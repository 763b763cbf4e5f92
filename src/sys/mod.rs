//! The kernel: the only room with `unsafe`.

pub mod atomic_file;
