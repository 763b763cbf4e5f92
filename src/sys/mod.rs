//! The kernel: the only room with `unsafe`.

pub mod atomic_file;
pub mod cgroup;
#[allow(unsafe_code, reason = "the allocator has no safe interface")]
pub mod heap;
pub mod machine;
pub mod mount_table;
#[allow(unsafe_code, reason = "unmapping has no safe interface")]
pub mod program;
pub mod sub_path;
