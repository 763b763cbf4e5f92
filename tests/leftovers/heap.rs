//! Counting allocator: number of live heap blocks, to detect leaks anywhere in the program.
//!
//! It counts blocks, not bytes, because maps and buffers may still grow in size.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    sync::atomic::{AtomicUsize, Ordering},
};

static ALLOCATED_BLOCKS: AtomicUsize = AtomicUsize::new(0);

/// Number of blocks allocated and not freed.
pub fn allocated_blocks() -> usize {
    ALLOCATED_BLOCKS.load(Ordering::Relaxed)
}

/// The system allocator with a counter.
struct CountingAllocator;

// SAFETY: every call is forwarded unchanged to the system allocator; counting does not allocate.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATED_BLOCKS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller upholds the same contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        ALLOCATED_BLOCKS.fetch_sub(1, Ordering::Relaxed);
        // SAFETY: the block was allocated by the system allocator with this layout.
        unsafe { System.dealloc(block, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;
