//! jemalloc configuration for a small, mostly idle agent, and its resource usage.
//!
//! A burst of allocations leaves holes. glibc returns only wholly free pages of its heap, and with blocks of all sizes
//! side by side few are: a node of 500 pods kept 18 MB that way. jemalloc separates sizes and returns free pages as
//! they appear. One arena is enough for two worker threads that mostly wait; thread caches would hide free blocks from
//! it, and later allocations fill its holes.

use std::ffi::c_char;

use nix::sys::{
    resource::{UsageWho, getrusage},
    time::TimeValLike,
};

/// jemalloc options, read before the first allocation. Free pages are returned within three seconds, so that a request
/// for statistics does not touch new pages for each line. A thread with a cache ([`keep_some_here`]) caches few and
/// only small blocks, and collects unused ones once per megabyte.
#[unsafe(export_name = "_rjem_malloc_conf")]
// SAFETY: the name is jemalloc's symbol for its options, a pointer to a NUL-terminated text that never changes.
static HABITS: &c_char = unsafe {
    &*c"narenas:1,tcache:false,tcache_max:14336,tcache_nslots_small_max:16,\
      tcache_gc_incr_bytes:1048576,dirty_decay_ms:3000,muzzy_decay_ms:0"
        .as_ptr()
};

/// Ensures that the options are linked into the program: the linker drops a library's constant without a reference, and
/// jemalloc then uses its defaults. Call once, at startup.
pub fn tune() {
    std::hint::black_box(HABITS);
}

/// Returns free pages whose decay time has passed to the kernel.
pub fn give_back_what_rests() {
    // jemalloc's number for "all arenas".
    const DECAY: &std::ffi::CStr = c"arena.4096.decay";
    let (value, size, none) = (std::ptr::null_mut(), std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: the name is NUL-terminated; the control neither reads nor writes a value, and is thread-safe at any time.
    // A failure changes nothing.
    let _done = unsafe { tikv_jemalloc_sys::mallctl(DECAY.as_ptr(), value, size, none, 0) };
}

/// Enables the thread cache of the calling thread: it is worth its memory for a thread with recurring, similar bursts
/// of work.
pub fn keep_some_here() {
    let mut keeps = true;
    let (old, none) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: the name is NUL-terminated; the control reads one C bool, which is a byte like ours. A failure changes
    // nothing.
    let _done = unsafe {
        tikv_jemalloc_sys::mallctl(
            c"thread.tcache.enabled".as_ptr(),
            old,
            none,
            (&raw mut keeps).cast(),
            size_of::<bool>(),
        )
    };
}

/// Resource usage of this process since its start.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Used {
    /// Minor page faults: first accesses to a page.
    pub page_faults: u64,
    /// CPU time in user and kernel mode, microseconds.
    pub processor: u64,
}

/// Resource usage of this process; all zeros if it cannot be read.
pub fn used() -> Used {
    let Ok(usage) = getrusage(UsageWho::RUSAGE_SELF) else { return Used::default() };
    let whole = |number: i64| u64::try_from(number).unwrap_or(0);
    let processor = usage.user_time().num_microseconds() + usage.system_time().num_microseconds();
    Used { page_faults: whole(usage.minor_page_faults()), processor: whole(processor) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jemalloc_has_read_its_habits() {
        tune();
        let (mut arenas, mut size) = (0_u32, size_of::<u32>());
        let value = (&raw mut arenas).cast();
        // SAFETY: the control writes one number of this size.
        let refused = unsafe {
            tikv_jemalloc_sys::mallctl(c"opt.narenas".as_ptr(), value, &raw mut size, std::ptr::null_mut(), 0)
        };
        assert_eq!((refused, arenas), (0, 1));
    }

    #[test]
    fn only_a_thread_that_says_so_keeps_blocks() {
        let keeps = || {
            let (mut keeps, mut size) = (false, size_of::<bool>());
            let value = (&raw mut keeps).cast();
            // SAFETY: the control writes one truth value of this size.
            let refused = unsafe {
                tikv_jemalloc_sys::mallctl(
                    c"thread.tcache.enabled".as_ptr(),
                    value,
                    &raw mut size,
                    std::ptr::null_mut(),
                    0,
                )
            };
            (refused, keeps)
        };
        let there = std::thread::spawn(move || {
            let before = keeps();
            keep_some_here();
            (before, keeps())
        });
        assert_eq!(there.join().expect("it ends"), ((0, false), (0, true)));
        assert_eq!(keeps(), (0, false));
    }

    #[test]
    fn new_memory_shows_as_faults() {
        let before = used().page_faults;
        // Other tests may have left touched free pages, but only a limited number.
        let mut kept = Vec::new();
        while used().page_faults == before && kept.len() < 64 {
            kept.push(std::hint::black_box(vec![1_u8; 4 << 20]));
        }
        assert!(used().page_faults > before && used().processor > 0);
        drop(kept);
        give_back_what_rests();
    }
}
