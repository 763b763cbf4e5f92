//! CPU profiler: samples stacks on `SIGPROF`, 99 times per second of CPU time.
//!
//! A timer of the process's CPU time raises `SIGPROF`; the handler walks the stack into memory that was mapped before
//! and has no other user. The handler takes no lock, allocates nothing, and reads no clock. When sampling ends, its
//! pages are returned to the kernel. docs/architecture.md explains why the `pprof` crate does not fit.

use std::{
    sync::{
        LazyLock,
        atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use nix::{
    libc,
    sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction},
};

/// Samples per second of CPU time; not a multiple of ten, so as not to synchronize with timers.
pub const SAMPLES_PER_SECOND: u32 = 99;
/// Maximum number of stack frames stored, innermost first.
const MAX_DEPTH: usize = 96;
/// Maximum number of samples per profile; further ones are dropped.
const MAX_SAMPLES: usize = 8192;

/// Buffer that the signal handler writes. Mapped as all zeros: no samples.
#[repr(C)]
struct Buffer {
    next: AtomicUsize,
    samples: [Sample; MAX_SAMPLES],
}

#[repr(C)]
struct Sample {
    /// Number of frames; written last.
    length: AtomicUsize,
    frames: [AtomicU64; MAX_DEPTH],
}

static BUFFER: AtomicPtr<Buffer> = AtomicPtr::new(std::ptr::null_mut());
static BUSY: AtomicBool = AtomicBool::new(false);

/// Reason why sampling cannot start.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StartError {
    /// Another sampling is active.
    Busy,
    /// The kernel refused the memory, the signal handler, or the timer.
    Kernel,
}

/// Active sampling; dropping it stops the sampling.
#[derive(Debug)]
pub struct CpuProfiler(());

impl CpuProfiler {
    /// Starts sampling.
    ///
    /// # Errors
    /// If another sampling is active, or the kernel refuses.
    pub fn start() -> Result<Self, StartError> {
        if BUSY.swap(true, Ordering::AcqRel) {
            return Err(StartError::Busy);
        }
        let profiler = Self(()); // from here on, dropping it cleans up
        static MAPPED: LazyLock<Option<usize>> = LazyLock::new(|| map(size_of::<Buffer>()));
        let buffer = MAPPED.ok_or(StartError::Kernel)?;
        static INSTALLED: LazyLock<bool> = LazyLock::new(install_handler);
        // The unwinder initializes itself at its first use, which must not happen in the signal handler.
        backtrace::trace(|_| true);
        if !*INSTALLED {
            return Err(StartError::Kernel);
        }
        BUFFER.store(std::ptr::with_exposed_provenance_mut(buffer), Ordering::Release);
        if set_timer(1_000_000 / SAMPLES_PER_SECOND) { Ok(profiler) } else { Err(StartError::Kernel) }
    }

    /// Stacks so far: instruction addresses, innermost first, without the frames of the signal handler.
    pub fn stacks(&self) -> Vec<Vec<u64>> {
        let buffer = BUFFER.load(Ordering::Acquire);
        // SAFETY: null, or the mapping that is never unmapped and whose parts are all atomics.
        let Some(buffer) = (unsafe { buffer.as_ref() }) else { return Vec::new() };
        let stack = |sample: &Sample| -> Vec<u64> {
            let length = sample.length.load(Ordering::Acquire);
            sample.frames.iter().take(length).map(|frame| frame.load(Ordering::Relaxed)).collect()
        };
        let taken = buffer.next.load(Ordering::Acquire);
        let stacks = buffer.samples.iter().take(taken).map(stack).filter(|stack| !stack.is_empty()).collect();
        without_handler(stacks)
    }
}

impl Drop for CpuProfiler {
    fn drop(&mut self) {
        set_timer(0);
        let buffer = BUFFER.swap(std::ptr::null_mut(), Ordering::AcqRel);
        if !buffer.is_null() {
            // A handler that still runs has a few microseconds of work left.
            std::thread::sleep(Duration::from_millis(2));
            // SAFETY: exactly our mapping; its pages read as zero afterwards, as they did at first.
            let _kept = unsafe { libc::madvise(buffer.cast(), size_of::<Buffer>(), libc::MADV_DONTNEED) };
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

extern "C" fn sample(_signal: libc::c_int) {
    // SAFETY: null, or the mapping that is never unmapped and whose parts are all atomics.
    let Some(buffer) = (unsafe { BUFFER.load(Ordering::Acquire).as_ref() }) else { return };
    let Some(sample) = buffer.samples.get(buffer.next.fetch_add(1, Ordering::AcqRel)) else { return };
    // SAFETY: errno belongs to this thread; its address is always valid.
    let errno = unsafe { *libc::__errno_location() };
    let mut length = 0;
    // SAFETY: "unsynchronized" forbids concurrent symbol lookups elsewhere; this only walks frames, which takes no
    // lock (glibc ≥ 2.35) and allocates nothing after its first use.
    unsafe {
        backtrace::trace_unsynchronized(|frame| {
            if let Some(place) = sample.frames.get(length) {
                place.store(frame.ip().addr() as u64, Ordering::Relaxed);
                length += 1;
            }
            length < MAX_DEPTH
        });
    }
    sample.length.store(length, Ordering::Release);
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
}

/// Maps private anonymous zeroed pages that are never unmapped; the address is exposed.
fn map(bytes: usize) -> Option<usize> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: a new mapping at a place the kernel chooses touches nothing that exists.
    let at = unsafe { libc::mmap(std::ptr::null_mut(), bytes, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
    (at != libc::MAP_FAILED).then(|| at.expose_provenance())
}

/// Installs the handler. It stays when sampling ends: a late signal would otherwise terminate the process.
fn install_handler() -> bool {
    let action = SigAction::new(SigHandler::Handler(sample), SaFlags::SA_RESTART, SigSet::empty());
    // SAFETY: the handler is async-signal-safe.
    unsafe { sigaction(Signal::SIGPROF, &action) }.is_ok()
}

/// Sets the interval of the profiling timer, microseconds of CPU time; 0 stops it.
fn set_timer(interval: u32) -> bool {
    let interval = libc::timeval { tv_sec: 0, tv_usec: libc::suseconds_t::from(interval) };
    let timer = libc::itimerval { it_interval: interval, it_value: interval };
    // SAFETY: reads one struct of ours.
    unsafe { libc::setitimer(libc::ITIMER_PROF, &timer, std::ptr::null_mut()) == 0 }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn who_is_busy_is_seen() {
        let sampling = CpuProfiler::start().expect("the first");
        assert_eq!(CpuProfiler::start().err(), Some(StartError::Busy));
        let (began, mut sum) = (Instant::now(), 0_u64);
        while sampling.stacks().len() < 5 && began.elapsed() < Duration::from_secs(20) {
            sum = (0..1_000_000).fold(sum, |sum, n| std::hint::black_box(sum ^ n));
        }
        assert!(sampling.stacks().len() >= 5);
        let here: *const () = who_is_busy_is_seen as *const ();
        let near = |ip: &u64| ip.abs_diff(here.addr() as u64) < 1 << 24;
        assert!(sampling.stacks().iter().any(|stack| stack.iter().any(near)), "a stack leads here");
        drop(sampling);
        let again = CpuProfiler::start().expect("it is over");
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
