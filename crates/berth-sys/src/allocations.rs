//! Who asked for memory: the allocator, with a sampler that is off until somebody looks.
//!
//! Off, it costs a load and a branch each way. On, every 512 KiB or so of a thread's requests (an exponential
//! distance, so that no pattern hides) one block is noted with its stack, and forgotten when it is freed. Blocks
//! that are not noted pass by a small table of counters. What is noted lies in pages mapped once, whose size is
//! bounded; they stay, for who has looked once will look again.
//!
//! Nothing here may allocate where it is asked for memory: a thread that is noting is not noted.

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

/// Bytes between two samples of a thread, on average.
pub const INTERVAL: u64 = 512 << 10;
/// Frames of a stack that are kept, innermost first.
const DEPTH: usize = 72;
/// Different stacks; what comes after is lost, and counted.
const STACKS: usize = 2048;
/// Noted blocks that are not freed yet; likewise.
const BLOCKS: usize = 16_384;
/// Chains of either table.
const CHAINS: usize = 4096;

static ON: AtomicBool = AtomicBool::new(false);
static BOOK: Mutex<Option<&'static mut Book>> = Mutex::new(None);
/// How many noted blocks share a chain; who finds zero need not look further.
static NOTED: [AtomicU16; CHAINS] = [const { AtomicU16::new(0) }; CHAINS];

/// jemalloc, sampled.
#[derive(Debug)]
pub struct Sampled;

// SAFETY: every call goes on to jemalloc as it came, and its answer is returned as it is.
unsafe impl GlobalAlloc for Sampled {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promises are the ones asked for.
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
        // Before: as soon as it is free, somebody else may get it.
        lost(block);
        // SAFETY: as above.
        unsafe { Jemalloc.dealloc(block, layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        let noted = lost(block);
        // SAFETY: as above.
        let moved = unsafe { Jemalloc.realloc(block, layout, size) };
        match noted {
            // It was refused: the old block lives on.
            Some(noted) if moved.is_null() => put_back(noted),
            _ => gained(moved, size),
        }
        moved
    }
}

/// So many blocks of so many bytes together.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Sum {
    /// Blocks.
    pub blocks: u64,
    /// Bytes.
    pub bytes: u64,
}

/// What was noted of one stack since sampling began.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Noted {
    /// Addresses of instructions, innermost first; the first ones are the allocator's own.
    pub frames: Vec<u64>,
    /// What was asked for.
    pub asked: Sum,
    /// What was freed of it.
    pub freed: Sum,
}

/// Everything noted since sampling began.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Record {
    /// By stack, in the order of their first samples: a later record begins with the same stacks.
    pub stacks: Vec<Noted>,
    /// Samples there was no room for.
    pub missed: u64,
}

/// Begins to sample, for good; tells whether that was now.
///
/// # Errors
/// The kernel gives no memory.
pub fn start() -> Result<bool, std::io::Error> {
    // The unwinder sets itself up at its first use, which had better not be in the middle of a request.
    backtrace::trace(|_| true);
    let mut book = open();
    if book.is_some() {
        return Ok(false);
    }
    let pages = sampler::map(size_of::<Book>()).ok_or_else(std::io::Error::last_os_error)?;
    let pages: *mut Book = std::ptr::with_exposed_provenance_mut(pages);
    // SAFETY: a mapping of this size that is never unmapped and that nobody else knows; all zero is a valid book.
    *book = Some(unsafe { &mut *pages });
    ON.store(true, Ordering::Release);
    Ok(true)
}

/// What was noted so far; nothing where nobody began.
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

/// What lies in the pages. All zero when they are mapped: nothing. Places are counted from 1; 0 is none.
struct Book {
    stacks_used: usize,
    blocks_used: usize,
    /// Freed places among the blocks, a chain.
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
            // It would be held for ever otherwise.
            if let Some(known) = at_mut(&mut self.stacks, stack) {
                known.freed.add(bytes);
            }
        }
    }

    /// The place of a stack, new or known; 0 where there is no room.
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

    /// Takes a block out, where it was noted.
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

/// Spreads the bits of a number over all of it.
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

/// What a thread knows of its own requests. Plain cells, alive as long as the thread is.
#[derive(Clone, Copy)]
struct Meter {
    /// Bytes until the next sample; nothing is drawn yet while the seed is 0.
    left: i64,
    seed: u64,
    is_noting: bool,
}

thread_local! {
    static METER: Cell<Meter> = const { Cell::new(Meter { left: 0, seed: 0, is_noting: false }) };
}

/// As long as this lives, nothing that this thread allocates or frees is looked at.
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

/// Whether this request of the thread is one to be noted.
fn is_due(bytes: usize) -> bool {
    let mut meter = METER.get();
    if meter.is_noting {
        return false;
    }
    if meter.seed == 0 {
        // The address of the meter differs from thread to thread.
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

/// Bytes until the next sample: exponentially distributed.
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
    // SAFETY: "unsynchronized" means that symbols must not be looked up at the same time elsewhere; frames only
    // are walked here.
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
        return None; // its own blocks are never noted
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
