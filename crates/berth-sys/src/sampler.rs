//! CPU profiler: samples stacks on `SIGPROF`, 99 times per second of CPU time.
//!
//! A timer of the process's CPU time raises `SIGPROF`; the handler walks the stack into memory that was mapped before
//! and has no other user. The handler takes no lock, allocates nothing, and reads no clock. When sampling ends, its
//! pages are returned to the kernel, so that one profile a year costs nothing for the rest of it; the `pprof` crate is
//! not used because its tables stay allocated (64 MB).

use std::{
    sync::{
        LazyLock,
        atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use nix::libc;

/// Samples per second of CPU time; not a multiple of ten, so as not to synchronize with timers.
pub const PER_SECOND: u32 = 99;
/// Maximum number of stack frames stored, innermost first.
const DEPTH: usize = 96;
/// Maximum number of samples per profile; further ones are dropped.
const MOST: usize = 8192;

/// Buffer that the signal handler writes. Mapped as all zeros: no samples.
#[repr(C)]
struct Store {
    next: AtomicUsize,
    slots: [Slot; MOST],
}

#[repr(C)]
struct Slot {
    /// Number of frames; written last.
    length: AtomicUsize,
    frames: [AtomicU64; DEPTH],
}

static STORE: AtomicPtr<Store> = AtomicPtr::new(std::ptr::null_mut());
static BUSY: AtomicBool = AtomicBool::new(false);

/// Why sampling cannot start.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Refused {
    /// Another sampling is active.
    Busy,
    /// The kernel refused the memory, the signal handler, or the timer.
    Kernel,
}

/// Guard of an active sampling; dropping it stops the sampling.
#[derive(Debug)]
pub struct Sampling(());

impl Sampling {
    /// Starts sampling.
    ///
    /// # Errors
    /// If another sampling is active, or the kernel refuses.
    pub fn start() -> Result<Self, Refused> {
        if BUSY.swap(true, Ordering::AcqRel) {
            return Err(Refused::Busy);
        }
        let sampling = Self(()); // from here on, dropping it cleans up
        static MAPPED: LazyLock<Option<usize>> = LazyLock::new(|| map(size_of::<Store>()));
        let store = MAPPED.ok_or(Refused::Kernel)?;
        static HANDLED: LazyLock<bool> = LazyLock::new(handle);
        // The unwinder initializes itself at its first use, which must not happen in the signal handler.
        backtrace::trace(|_| true);
        if !*HANDLED {
            return Err(Refused::Kernel);
        }
        STORE.store(std::ptr::with_exposed_provenance_mut(store), Ordering::Release);
        if set_timer(1_000_000 / PER_SECOND) { Ok(sampling) } else { Err(Refused::Kernel) }
    }

    /// Stacks so far: instruction addresses, innermost first, without the frames of the signal handler.
    pub fn stacks(&self) -> Vec<Vec<u64>> {
        let store = STORE.load(Ordering::Acquire);
        // SAFETY: null, or the mapping that is never unmapped and whose parts are all atomics.
        let Some(store) = (unsafe { store.as_ref() }) else { return Vec::new() };
        let stack = |slot: &Slot| -> Vec<u64> {
            let length = slot.length.load(Ordering::Acquire);
            slot.frames.iter().take(length).map(|frame| frame.load(Ordering::Relaxed)).collect()
        };
        let taken = store.next.load(Ordering::Acquire);
        let stacks = store.slots.iter().take(taken).map(stack).filter(|stack| !stack.is_empty()).collect();
        without_handler(stacks)
    }
}

impl Drop for Sampling {
    fn drop(&mut self) {
        set_timer(0);
        let store = STORE.swap(std::ptr::null_mut(), Ordering::AcqRel);
        if !store.is_null() {
            // A handler that still runs has a few microseconds of work left.
            std::thread::sleep(Duration::from_millis(2));
            // SAFETY: exactly our mapping; its pages read as zero afterwards, as they did at first.
            let _kept = unsafe { libc::madvise(store.cast(), size_of::<Store>(), libc::MADV_DONTNEED) };
        }
        BUSY.store(false, Ordering::Release);
    }
}

/// Removes the handler's frames: the innermost ones, equal in every stack.
fn without_handler(mut stacks: Vec<Vec<u64>>) -> Vec<Vec<u64>> {
    let Some((first, rest)) = stacks.split_first() else { return stacks };
    let same = |stack: &Vec<u64>| first.iter().zip(stack).take_while(|(a, b)| a == b).count();
    let Some(common) = rest.iter().map(same).min() else { return stacks };
    // If all samples are at one instruction, only that frame stays.
    let shortest = stacks.iter().map(Vec::len).min().unwrap_or(0);
    let own = if stacks.iter().all(|stack| *stack == stacks[0]) { 0 } else { common.min(shortest.saturating_sub(1)) };
    stacks.iter_mut().for_each(|stack| drop(stack.drain(..own)));
    stacks
}

extern "C" fn note(_signal: libc::c_int) {
    // SAFETY: null, or the mapping that is never unmapped and whose parts are all atomics.
    let Some(store) = (unsafe { STORE.load(Ordering::Acquire).as_ref() }) else { return };
    let Some(slot) = store.slots.get(store.next.fetch_add(1, Ordering::AcqRel)) else { return };
    // SAFETY: errno belongs to this thread; its address is always valid.
    let errno = unsafe { *libc::__errno_location() };
    let mut length = 0;
    // SAFETY: "unsynchronized" forbids concurrent symbol lookups elsewhere; this only walks frames, which takes no
    // lock (glibc ≥ 2.35) and allocates nothing after its first use.
    unsafe {
        backtrace::trace_unsynchronized(|frame| {
            if let Some(place) = slot.frames.get(length) {
                place.store(frame.ip().addr() as u64, Ordering::Relaxed);
                length += 1;
            }
            length < DEPTH
        });
    }
    slot.length.store(length, Ordering::Release);
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
}

/// Maps private anonymous zeroed pages that are never unmapped; the address is exposed.
pub(super) fn map(bytes: usize) -> Option<usize> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a new mapping at a place the kernel chooses touches nothing that exists.
    let at = unsafe { libc::mmap(std::ptr::null_mut(), bytes, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
    (at != libc::MAP_FAILED).then(|| at.expose_provenance())
}

/// Installs the handler. It stays when sampling ends: a late signal would otherwise terminate the process.
fn handle() -> bool {
    // SAFETY: all zeros is a valid sigaction: no flags, an empty mask.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = note as *const () as usize;
    action.sa_flags = libc::SA_RESTART;
    // SAFETY: the handler has the right type and is async-signal-safe.
    unsafe { libc::sigaction(libc::SIGPROF, &action, std::ptr::null_mut()) == 0 }
}

/// Sets the interval of the profiling timer, microseconds of CPU time; 0 stops it.
fn set_timer(every: u32) -> bool {
    let every = libc::timeval { tv_sec: 0, tv_usec: libc::suseconds_t::from(every) };
    let timer = libc::itimerval { it_interval: every, it_value: every };
    // SAFETY: reads one struct of ours.
    unsafe { libc::setitimer(libc::ITIMER_PROF, &timer, std::ptr::null_mut()) == 0 }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn who_is_busy_is_seen() {
        let sampling = Sampling::start().expect("the first");
        assert_eq!(Sampling::start().err(), Some(Refused::Busy));
        let (began, mut sum) = (Instant::now(), 0_u64);
        while sampling.stacks().len() < 5 && began.elapsed() < Duration::from_secs(20) {
            sum = (0..1_000_000).fold(sum, |sum, n| std::hint::black_box(sum ^ n));
        }
        assert!(sampling.stacks().len() >= 5);
        let here: *const () = who_is_busy_is_seen as *const ();
        let near = |ip: &u64| ip.abs_diff(here.addr() as u64) < 1 << 24;
        assert!(sampling.stacks().iter().any(|stack| stack.iter().any(near)), "a stack leads here");
        drop(sampling);
        let again = Sampling::start().expect("it is over");
        assert!(again.stacks().len() < 5, "nothing is left of the one before");
    }

    #[test]
    fn the_handlers_frames_are_taken_off() {
        let stack = |text: &str| text.bytes().map(u64::from).collect::<Vec<u64>>();
        let off = |stacks: &[&str]| without_handler(stacks.iter().map(|s| stack(s)).collect());
        assert_eq!(off(&["hhab", "hhcb"]), [stack("ab"), stack("cb")]);
        assert_eq!(off(&["hhab", "hhab"]), [stack("hhab"), stack("hhab")], "nothing tells them apart");
        assert_eq!(off(&["hha", "hhab"]), [stack("a"), stack("ab")]);
        assert!(off(&[]).is_empty());
    }
}
