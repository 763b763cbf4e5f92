//! jemalloc settings for a small, mostly idle agent.
//!
//! glibc returns only entirely free pages of its heap, and these are rare if blocks of all sizes are mixed: with 500
//! pods it kept 18 MB that way. jemalloc separates size classes and returns free pages after a delay. One arena
//! suffices for two mostly idle worker threads; thread caches would hide free blocks from it.

use std::ffi::{CStr, c_char};

pub use tikv_jemallocator::Jemalloc;

/// Options, read by jemalloc before the first allocation: free pages return to the kernel within three seconds, so that a
/// page of statistics does not have to fault in new ones for each line. Profiling is prepared, and off.
#[unsafe(export_name = "_rjem_malloc_conf")]
// SAFETY: the name is jemalloc's own for its options, a pointer to text that ends with a zero and never changes.
static OPTIONS: &c_char = unsafe { &*OPTION_TEXT.as_ptr() };
const OPTION_TEXT: &CStr = c"narenas:1,tcache:false,dirty_decay_ms:3000,muzzy_decay_ms:0,\
    prof:true,prof_active:false,prof_accum:true,lg_prof_sample:19";

/// Makes sure that the options are linked: the linker drops an unreferenced constant of a library, and jemalloc would
/// use its defaults. Call once, at the start.
pub fn tune() {
    std::hint::black_box(OPTIONS);
}

/// Returns free pages past their decay time to the kernel; jemalloc does so by itself only during allocations.
pub fn purge() {
    // jemalloc's number for "all arenas".
    const DECAY: &CStr = c"arena.4096.decay";
    let (value, size, none) = (std::ptr::null_mut(), std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: the name is NUL-terminated; the control neither reads nor writes a value, and may be called from any
    // thread at any time. A failure changes nothing.
    let _done = unsafe { tikv_jemalloc_sys::mallctl(DECAY.as_ptr(), value, size, none, 0) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jemalloc_reads_its_options() {
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
    fn free_pages_are_purged() {
        drop(std::hint::black_box(vec![1_u8; 4 << 20]));
        purge();
    }
}
