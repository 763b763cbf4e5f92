//! Settings of jemalloc for an agent that is small and mostly idle.
//!
//! glibc returns only pages of its heap that are entirely free, and few are where blocks of all sizes lie side by side: a
//! node of 500 pods kept 18 MB that way. jemalloc separates sizes and returns free pages after a delay. One arena is
//! enough for two workers that mostly wait; caches of threads would hide free blocks from it.

use std::ffi::{CStr, c_char};

pub use tikv_jemallocator::Jemalloc;

/// Options, read by jemalloc before the first allocation: free pages return to the kernel within three seconds, so that a
/// page of statistics does not have to fault in new ones for each line. Profiling is prepared, and off.
#[unsafe(export_name = "_rjem_malloc_conf")]
// SAFETY: the name is jemalloc's own for its options, a pointer to text that ends with a zero and never changes.
static OPTIONS: &c_char = unsafe { &*OPTION_TEXT.as_ptr() };
const OPTION_TEXT: &CStr = c"narenas:1,tcache:false,dirty_decay_ms:3000,muzzy_decay_ms:0,\
    prof:true,prof_active:false,prof_accum:true,lg_prof_sample:19";

/// Makes sure that the options are linked into the program: the linker drops a library's constant that nothing names, and
/// jemalloc has other defaults. Call once, at the start.
pub fn tune() {
    std::hint::black_box(OPTIONS);
}

/// Returns free pages past their delay to the kernel; jemalloc does so by itself only while memory is allocated.
pub fn purge() {
    // jemalloc's number for "all arenas".
    const DECAY: &CStr = c"arena.4096.decay";
    let (value, size, none) = (std::ptr::null_mut(), std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: the name ends with a zero; the control neither reads nor writes a value, and may be called from any thread
    // at any time. A refusal changes nothing.
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
