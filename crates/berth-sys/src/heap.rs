//! The allocator's habits, set for an agent that is small and mostly idle.
//!
//! What a burst leaves are holes. glibc gives back the pages of its heap that are wholly free, and with blocks of all
//! sizes side by side few are: a node of 500 pods kept 18 MB that way. jemalloc keeps sizes apart and returns free
//! pages as they come. One arena is enough for two workers that mostly wait, and caches of threads would hide from
//! it what is free; its holes are filled by whoever comes next.

use std::ffi::c_char;

use nix::sys::{
    resource::{UsageWho, getrusage},
    time::TimeValLike,
};

/// Read by jemalloc before the first block is asked for. Free pages go back within three seconds, so that a page of
/// statistics that is asked for does not have to touch new ones for each line. A thread that keeps blocks
/// ([`keep_some_here`]) keeps few, and small ones, and looks for those it does not need once in a megabyte.
#[unsafe(export_name = "_rjem_malloc_conf")]
// SAFETY: the name is jemalloc's own for its options, a pointer to text that ends with a zero and never changes.
static HABITS: &c_char = unsafe {
    &*c"narenas:1,tcache:false,tcache_max:14336,tcache_nslots_small_max:16,\
      tcache_gc_incr_bytes:1048576,dirty_decay_ms:3000,muzzy_decay_ms:0"
        .as_ptr()
};

/// Makes sure that the habits are linked into the program: a library's constant that nobody names is left out, and
/// jemalloc has defaults of its own. Call once, at the start.
pub fn tune() {
    std::hint::black_box(HABITS);
}

/// Gives those free pages back to the kernel whose time has come.
pub fn give_back_what_rests() {
    // jemalloc's number for "all arenas".
    const DECAY: &std::ffi::CStr = c"arena.4096.decay";
    let (value, size, none) = (std::ptr::null_mut(), std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: the name ends with a zero; the control neither reads nor writes a value, and may be called from any thread
    // at any time. A refusal changes nothing.
    let _done = unsafe { tikv_jemalloc_sys::mallctl(DECAY.as_ptr(), value, size, none, 0) };
}

/// From now on this thread keeps some of the blocks it frees, for itself: to one that works in bursts that are all
/// alike they are worth what they take.
pub fn keep_some_here() {
    let mut keeps = true;
    let (old, none) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: the name ends with a zero; the control reads one truth value of C, which is a byte as ours is. A refusal
    // changes nothing.
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

/// What this process has used since it began.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Used {
    /// How often it has touched a page that it did not have yet.
    pub page_faults: u64,
    /// Time of processors, microseconds.
    pub processor: u64,
}

/// What this process has used.
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
        // Other tests may have left some that is touched already, but not without end.
        let mut kept = Vec::new();
        while used().page_faults == before && kept.len() < 64 {
            kept.push(std::hint::black_box(vec![1_u8; 4 << 20]));
        }
        assert!(used().page_faults > before && used().processor > 0);
        drop(kept);
        give_back_what_rests();
    }
}
