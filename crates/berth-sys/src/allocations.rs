//! Heap profiler: a jemalloc wrapper with a sampling profiler that is off until first used.
//!
//! Disabled, it costs a load and a branch per allocation and free. Enabled, it samples one block per 512 KiB of a
//! thread's requests on average (exponentially distributed, so that no pattern hides), records it with its stack, and
//! removes it on free. A small table of counters makes frees of unsampled blocks skip the lock. Samples are stored in
//! pages mapped once, of bounded size; they are never unmapped, because who profiled once will profile again.
//!
//! Nothing here may allocate while serving an allocation: a thread that records a sample is not sampled.

use std::{
    alloc::{GlobalAlloc, Layout},
    cell::Cell,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU16, Ordering},
    },
};

use tikv_jemallocator::Jemalloc;

use super::sampler;

/// Average number of bytes between two samples of a thread.
pub const INTERVAL: u64 = 512 << 10;
/// Maximum number of stack frames stored, innermost first.
const DEPTH: usize = 72;
/// Maximum number of distinct stacks; further ones are dropped and counted.
const STACKS: usize = 2048;
/// Maximum number of live sampled blocks; further ones are dropped and counted.
const BLOCKS: usize = 16_384;
/// Hash buckets of either table.
const CHAINS: usize = 4096;

static ON: AtomicBool = AtomicBool::new(false);
static BOOK: Mutex<Option<&'static mut Book>> = Mutex::new(None);
/// Number of sampled blocks per hash bucket; at zero, a free skips the table.
static NOTED: [AtomicU16; CHAINS] = [const { AtomicU16::new(0) }; CHAINS];

/// Global allocator: jemalloc with sampling.
#[derive(Debug)]
pub struct Sampled;

// SAFETY: every call is forwarded to jemalloc unchanged, and its result is returned unchanged.
unsafe impl GlobalAlloc for Sampled {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's guarantees are those that jemalloc requires.
        let block = unsafe { Jemalloc.alloc(layout) };
        gained(block, layout.size());
        block
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as above.
        let block = unsafe { Jemalloc.alloc_zeroed(layout) };
        gained(block, layout.size());
        block
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // Before the free: afterwards another thread may receive the same address.
        lost(block);
        // SAFETY: as above.
        unsafe { Jemalloc.dealloc(block, layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        let noted = lost(block);
        // SAFETY: as above.
        let moved = unsafe { Jemalloc.realloc(block, layout, size) };
        match noted {
            // The reallocation failed: the old block stays valid.
            Some(noted) if moved.is_null() => put_back(noted),
            _ => gained(moved, size),
        }
        moved
    }
}

/// Number of blocks and their total size.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Sum {
    /// Number of blocks.
    pub blocks: u64,
    /// Total bytes.
    pub bytes: u64,
}

/// Samples of one stack since sampling began.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Noted {
    /// Instruction addresses, innermost first; the first ones are the allocator's own.
    pub frames: Vec<u64>,
    /// Sampled allocations.
    pub asked: Sum,
    /// Sampled allocations that were freed.
    pub freed: Sum,
}

/// All samples since sampling began.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Record {
    /// By stack, in the order of their first samples: a later record begins with the same stacks.
    pub stacks: Vec<Noted>,
    /// Samples dropped because a table was full.
    pub missed: u64,
}

/// Starts sampling permanently; returns false if it had started before.
///
/// # Errors
/// If the kernel provides no memory.
pub fn start() -> Result<bool, std::io::Error> {
    // The unwinder initializes itself at its first use, which must not happen during an allocation.
    backtrace::trace(|_| true);
    let mut book = open();
    if book.is_some() {
        return Ok(false);
    }
    let pages = sampler::map(size_of::<Book>()).ok_or_else(std::io::Error::last_os_error)?;
    let pages: *mut Book = std::ptr::with_exposed_provenance_mut(pages);
    // SAFETY: a mapping of this size that is never unmapped and has no other user; all zeros is a valid book.
    *book = Some(unsafe { &mut *pages });
    ON.store(true, Ordering::Release);
    Ok(true)
}

/// Samples so far; empty if sampling was never started.
pub fn record() -> Record {
    let _unnoted = Noting::begin();
    let book = open();
    let Some(book) = book.as_ref() else { return Record::default() };
    let used = book.stacks.iter().take(book.stacks_used);
    let stacks = used.map(|stack| Noted {
        frames: stack.frames.iter().take(stack.length).map(|ip| *ip as u64).collect(),
        asked: stack.asked,
        freed: stack.freed,
    });
    Record { stacks: stacks.collect(), missed: book.missed }
}

/// Content of the mapped pages. Mapped as all zeros: empty. Indexes count from 1; 0 is none.
struct Book {
    stacks_used: usize,
    blocks_used: usize,
    /// Head of the free list of blocks.
    spare: u32,
    missed: u64,
    stack_chains: [u32; CHAINS],
    block_chains: [u32; CHAINS],
    stacks: [Stack; STACKS],
    blocks: [Block; BLOCKS],
}

struct Stack {
    next: u32,
    hash: u64,
    length: usize,
    asked: Sum,
    freed: Sum,
    frames: [usize; DEPTH],
}

#[derive(Clone, Copy)]
struct Block {
    next: u32,
    stack: u32,
    address: usize,
    bytes: usize,
}

impl Book {
    fn note(&mut self, address: usize, bytes: usize, frames: &[usize]) {
        let stack = self.stack(frames);
        let Some(known) = at_mut(&mut self.stacks, stack) else {
            self.missed = self.missed.saturating_add(1);
            return;
        };
        known.asked.add(bytes);
        if !self.keep(Block { next: 0, stack, address, bytes }) {
            self.missed = self.missed.saturating_add(1);
            // Otherwise it would count as live forever.
            if let Some(known) = at_mut(&mut self.stacks, stack) {
                known.freed.add(bytes);
            }
        }
    }

    /// Index of a stack, new or existing; 0 if the table is full.
    fn stack(&mut self, frames: &[usize]) -> u32 {
        let hash = frames.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, ip| mix(hash ^ *ip as u64));
        let chain = chain(hash);
        let mut place = self.stack_chains[chain];
        while let Some(known) = at_mut(&mut self.stacks, place) {
            if known.hash == hash && known.frames.get(..known.length) == Some(frames) {
                return place;
            }
            place = known.next;
        }
        let Some(new) = self.stacks.get_mut(self.stacks_used) else { return 0 };
        self.stacks_used += 1;
        new.hash = hash;
        new.length = frames.len().min(DEPTH);
        new.frames.iter_mut().zip(frames).for_each(|(place, ip)| *place = *ip);
        new.next = self.stack_chains[chain];
        self.stack_chains[chain] = u32::try_from(self.stacks_used).unwrap_or(0);
        self.stack_chains[chain]
    }

    fn keep(&mut self, block: Block) -> bool {
        let chain = chain(mix(block.address as u64));
        let place = match at_mut(&mut self.blocks, self.spare) {
            Some(spare) => std::mem::replace(&mut self.spare, spare.next),
            None => {
                self.blocks_used = (self.blocks_used + 1).min(BLOCKS + 1);
                u32::try_from(self.blocks_used).unwrap_or(0)
            }
        };
        let Some(free) = at_mut(&mut self.blocks, place) else { return false };
        *free = Block { next: self.block_chains[chain], ..block };
        self.block_chains[chain] = place;
        NOTED[chain].fetch_add(1, Ordering::Relaxed);
        true
    }

    /// Removes a block if it was sampled.
    fn forget(&mut self, address: usize) -> Option<Block> {
        let chain = chain(mix(address as u64));
        let (mut before, mut place) = (0, self.block_chains[chain]);
        loop {
            let found = *at_mut(&mut self.blocks, place)?;
            if found.address == address {
                match at_mut(&mut self.blocks, before) {
                    Some(before) => before.next = found.next,
                    None => self.block_chains[chain] = found.next,
                }
                if let Some(freed) = at_mut(&mut self.blocks, place) {
                    freed.next = std::mem::replace(&mut self.spare, place);
                }
                NOTED[chain].fetch_sub(1, Ordering::Relaxed);
                if let Some(stack) = at_mut(&mut self.stacks, found.stack) {
                    stack.freed.add(found.bytes);
                }
                return Some(found);
            }
            (before, place) = (place, found.next);
        }
    }
}

impl Sum {
    fn add(&mut self, bytes: usize) {
        self.blocks = self.blocks.saturating_add(1);
        self.bytes = self.bytes.saturating_add(bytes as u64);
    }
}

fn at_mut<T>(list: &mut [T], place: u32) -> Option<&mut T> {
    list.get_mut(usize::try_from(place).ok()?.checked_sub(1)?)
}

/// Hash finalizer: distributes the bits of a number.
fn mix(number: u64) -> u64 {
    let number = (number ^ (number >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    number ^ (number >> 32)
}

fn chain(hash: u64) -> usize {
    (hash % CHAINS as u64) as usize
}

fn open() -> MutexGuard<'static, Option<&'static mut Book>> {
    BOOK.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Per-thread sampling state. Plain cells, alive as long as the thread is.
#[derive(Clone, Copy)]
struct Meter {
    /// Bytes until the next sample; not drawn yet while the seed is 0.
    left: i64,
    seed: u64,
    is_noting: bool,
}

thread_local! {
    static METER: Cell<Meter> = const { Cell::new(Meter { left: 0, seed: 0, is_noting: false }) };
}

/// Guard: while it lives, allocations and frees of this thread are ignored.
struct Noting {
    was: bool,
}

impl Noting {
    fn begin() -> Self {
        let meter = METER.get();
        METER.set(Meter { is_noting: true, ..meter });
        Self { was: meter.is_noting }
    }
}

impl Drop for Noting {
    fn drop(&mut self) {
        METER.set(Meter { is_noting: self.was, ..METER.get() });
    }
}

#[inline]
fn gained(block: *mut u8, bytes: usize) {
    if ON.load(Ordering::Relaxed) && !block.is_null() && is_due(bytes) {
        note(block.addr(), bytes);
    }
}

/// Whether this request of the thread is to be sampled.
fn is_due(bytes: usize) -> bool {
    let mut meter = METER.get();
    if meter.is_noting {
        return false;
    }
    if meter.seed == 0 {
        // The address of the meter differs between threads.
        meter.seed = METER.with(|here| mix(std::ptr::from_ref(here).addr() as u64)) | 1;
        meter.left = distance(&mut meter.seed);
    }
    meter.left = meter.left.saturating_sub(i64::try_from(bytes).unwrap_or(i64::MAX));
    let is_due = meter.left < 0;
    if is_due {
        meter.left = distance(&mut meter.seed);
    }
    METER.set(meter);
    is_due
}

/// Draws the bytes until the next sample: exponentially distributed.
fn distance(seed: &mut u64) -> i64 {
    *seed ^= *seed << 13;
    *seed ^= *seed >> 7;
    *seed ^= *seed << 17;
    let uniform = ((*seed >> 11) as f64 + 1.0) / (1_u64 << 53) as f64;
    (-uniform.ln() * INTERVAL as f64) as i64
}

#[cold]
fn note(address: usize, bytes: usize) {
    let _noting = Noting::begin();
    let mut frames = [0; DEPTH];
    let mut length = 0;
    // SAFETY: "unsynchronized" forbids concurrent symbol lookups elsewhere; this only walks frames.
    unsafe {
        backtrace::trace_unsynchronized(|frame| {
            if let Some(place) = frames.get_mut(length) {
                *place = frame.ip().addr();
                length += 1;
            }
            length < DEPTH
        });
    }
    if let Some(book) = open().as_mut() {
        book.note(address, bytes, frames.get(..length).unwrap_or_default());
    }
}

#[inline]
fn lost(block: *mut u8) -> Option<Block> {
    let address = block.addr();
    let may_be_noted = ON.load(Ordering::Relaxed) && NOTED[chain(mix(address as u64))].load(Ordering::Relaxed) > 0;
    if may_be_noted { forget(address) } else { None }
}

#[cold]
fn forget(address: usize) -> Option<Block> {
    if METER.get().is_noting {
        return None; // the profiler's own blocks are never sampled
    }
    let _noting = Noting::begin();
    open().as_mut()?.forget(address)
}

#[cold]
fn put_back(block: Block) {
    let _noting = Noting::begin();
    if let Some(book) = open().as_mut()
        && book.keep(block)
        && let Some(stack) = at_mut(&mut book.stacks, block.stack)
    {
        stack.freed.blocks = stack.freed.blocks.saturating_sub(1);
        stack.freed.bytes = stack.freed.bytes.saturating_sub(block.bytes as u64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn book() -> &'static mut Book {
        let pages = sampler::map(size_of::<Book>()).expect("memory");
        let pages: *mut Book = std::ptr::with_exposed_provenance_mut(pages);
        // SAFETY: as in `start`.
        unsafe { &mut *pages }
    }

    fn sums(book: &Book) -> Vec<(u64, u64, u64)> {
        book.stacks.iter().take(book.stacks_used).map(|s| (s.asked.blocks, s.asked.bytes, s.freed.bytes)).collect()
    }

    #[test]
    fn blocks_are_noted_by_stack_and_forgotten() {
        let book = book();
        for n in 0..1_000 {
            book.note(0x1000 + n * 16, 10, if n % 2 == 0 { &[1, 2, 3] } else { &[1, 2] });
        }
        assert_eq!(sums(book), [(500, 5_000, 0), (500, 5_000, 0)]);
        assert!(book.forget(0x1008).is_none(), "nobody has it");
        for n in 0..1_000 {
            assert!(book.forget(0x1000 + n * 16).is_some_and(|block| block.bytes == 10), "{n}");
            assert!(book.forget(0x1000 + n * 16).is_none(), "once only");
        }
        assert_eq!(sums(book), [(500, 5_000, 5_000), (500, 5_000, 5_000)]);
        book.note(0x1000, 7, &[1, 2]);
        assert_eq!((book.blocks_used, sums(book)[1]), (1_000, (501, 5_007, 5_000)), "places are used again");
        assert!(book.forget(0x1000).is_some());
    }

    #[test]
    fn what_there_is_no_room_for_is_counted_and_not_held() {
        let book = book();
        for n in 0..BLOCKS + 5 {
            book.note(0x1000 + n, 1, &[7]);
        }
        assert_eq!((book.missed, sums(book)[0]), (5, (16_389, 16_389, 5)));
        for n in 1..STACKS {
            book.forget(0x1000 + n);
            book.note(0x1000 + n, 1, &[7, n]);
        }
        book.forget(0x1000);
        book.note(0x1000, 1, &[8]);
        assert_eq!((book.stacks_used, book.missed), (STACKS, 6));
        for n in 0..BLOCKS {
            book.forget(0x1000 + n);
        }
    }

    #[test]
    fn distances_are_exponential() {
        let mut seed = 42;
        let drawn: Vec<i64> = (0..20_000).map(|_| distance(&mut seed)).collect();
        let mean = drawn.iter().sum::<i64>() / 20_000;
        assert!(mean.abs_diff(INTERVAL as i64) < INTERVAL / 20, "{mean}");
        let longer = drawn.iter().filter(|d| **d > INTERVAL as i64).count();
        assert!(longer.abs_diff(7_358) < 400, "{longer} of 20,000 are longer than the mean");
    }
}
