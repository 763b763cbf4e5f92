//! Kernel interfaces (cgroups, mounts, netlink, processes, TLS); the only crate with `unsafe` code.

#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "tests remove what they have made themselves"))]

pub mod atomic_file;
pub mod backoff;
pub mod beneath;
pub mod blocking_pool;
pub mod cgroup;
#[allow(unsafe_code, reason = "processes without a program have no safe interface")]
pub mod child_process;
#[cfg(feature = "agent")]
#[allow(unsafe_code, reason = "signal handlers and timers have no safe interface")]
pub mod cpu_profile;
#[allow(unsafe_code, reason = "bpf has no safe interface")]
pub mod device_filter;
pub mod disk_walk;
pub mod failpoint;
pub mod file_watch;
#[cfg(feature = "agent")]
pub mod grpc_deadline;
#[cfg(feature = "agent")]
#[allow(unsafe_code, reason = "the allocator has no safe interface")]
pub mod heap_profile;
pub mod in_root;
#[allow(unsafe_code, reason = "interface requests have no safe interface")]
pub mod interface;
#[cfg(feature = "agent")]
#[allow(unsafe_code, reason = "the allocator has no safe interface")]
pub mod jemalloc;
pub mod kernel_log;
pub mod landlock;
#[cfg(feature = "agent")]
pub mod logind;
pub mod machine;
pub mod memory_events;
pub mod mount;
#[allow(unsafe_code, reason = "mount_setattr has no safe interface")]
pub mod mount_api;
pub mod mount_table;
pub mod net_namespace;
#[allow(unsafe_code, reason = "the runtime polls descriptors by an unsafe interface only")]
pub mod netlink;
#[allow(unsafe_code, reason = "the C library's resolver has no safe interface")]
pub mod nss;
pub mod oom_events;
pub mod open_files;
pub mod panics;
#[allow(unsafe_code, reason = "watching a descriptor has no safe interface")]
pub mod polled_fd;
pub mod privileges;
pub mod selinux;
#[allow(unsafe_code, reason = "real-time signals have no safe constructor")]
pub mod signal;
pub mod single_flight;
pub mod sub_path;
#[cfg(feature = "agent")]
pub mod tls;
pub mod token_bucket;
#[allow(unsafe_code, reason = "unmapping has no safe interface")]
pub mod tree_removal;
#[allow(unsafe_code, reason = "beginning to write has no safe interface")]
pub mod write_back;
