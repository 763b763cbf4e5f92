//! The kernel: the only room with `unsafe`.

#[allow(unsafe_code, reason = "an allocator has no safe interface")]
pub mod allocations;
pub mod atomic_file;
pub mod beneath;
pub mod cgroup;
#[allow(unsafe_code, reason = "the allocator has no safe interface")]
pub mod heap;
pub mod machine;
pub mod mount_table;
#[allow(unsafe_code, reason = "unmapping has no safe interface")]
pub mod program;
#[allow(unsafe_code, reason = "signal handlers and timers have no safe interface")]
pub mod sampler;
#[allow(unsafe_code, reason = "real-time signals have no safe constructor")]
pub mod signal;
pub mod sub_path;
#[allow(unsafe_code, reason = "watching a descriptor has no safe interface")]
pub mod watched;
