//! The kernel: the only room with `unsafe`.

pub mod atomic_file;
pub mod mount_table;
