//! Counts the blocks that this program holds on the heap: what is never let go shows as growth,
//! wherever it is kept. Blocks and not bytes, because maps and buffers may still grow by a size.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    sync::atomic::{AtomicUsize, Ordering},
};

static HELD: AtomicUsize = AtomicUsize::new(0);

/// Blocks that were asked for and not given back.
pub fn held() -> usize {
    HELD.load(Ordering::Relaxed)
}

/// The system's allocator, with a counter.
struct Counting;

// SAFETY: every call goes on to the system's allocator as it came; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        HELD.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promises are the ones asked for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        HELD.fetch_sub(1, Ordering::Relaxed);
        // SAFETY: the block came from the system's allocator with this layout.
        unsafe { System.dealloc(block, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;
