//! Deterministic randomness: all random numbers of a run derive from its seed.
//!
//! Hash maps, `rand`, and tokio use `getrandom(2)`; the standard library calls it by a weak symbol so that a program
//! can override it. Here a thread with a seed gets numbers from it, every other thread from the kernel. Tokio adds a
//! process-wide counter of its draws; a replay skips as many as the seeds before it would have drawn.

use std::{cell::Cell, fs::File, io::Read};

thread_local! {
    static STATE: Cell<Option<u64>> = const { Cell::new(None) };
}

/// Seeds this thread from now on.
pub fn seed(seed: u64) {
    STATE.set(Some(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1));
}

/// Runs `one` for each of the seeds below `seed`, each on its own thread.
pub fn skip(seeds: u64, one: fn()) {
    for _ in 0..seeds {
        std::thread::spawn(one).join().expect("it does not panic");
    }
}

/// One step of SplitMix64.
fn next(state: u64) -> (u64, u64) {
    let state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    (state, z ^ (z >> 31))
}

fn fill(buffer: &mut [u8]) -> bool {
    let Some(mut state) = STATE.get() else {
        return File::open("/dev/urandom").and_then(|mut file| file.read_exact(buffer)).is_ok();
    };
    for chunk in buffer.chunks_mut(8) {
        let (after, word) = next(state);
        state = after;
        chunk.copy_from_slice(&word.to_le_bytes()[..chunk.len()]);
    }
    STATE.set(Some(state));
    true
}

/// Overrides the C library's function of that name in this program.
///
/// # Safety
/// As getrandom(2): `buffer` is writable for `length` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getrandom(buffer: *mut u8, length: usize, _flags: u32) -> isize {
    if length == 0 {
        return 0;
    }
    // SAFETY: the caller guarantees a buffer of that length; it is not read.
    let buffer = unsafe { std::slice::from_raw_parts_mut(buffer, length) };
    if fill(buffer) { isize::try_from(length).unwrap_or(isize::MAX) } else { -1 }
}
