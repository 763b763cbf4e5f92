//! The kernel: the only room with `unsafe`.

pub mod atomic_file;
pub mod cgroup;
pub mod machine;
pub mod mount_table;
pub mod sub_path;
