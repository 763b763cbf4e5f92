//! All chance of a run from its seed.
//!
//! Hash maps, `rand` and tokio draw on `getrandom(2)`; the standard library calls it by a weak
//! symbol just so that a program may answer in its stead. Here a thread that has a seed is
//! answered from it, every other one from the kernel. Tokio adds a counter of its draws in this
//! process; a replay passes over as many as the seeds before it would have made.

use std::{cell::Cell, fs::File, io::Read};

thread_local! {
    static STATE: Cell<Option<u64>> = const { Cell::new(None) };
}

/// From now on this thread's chance is that of the seed.
pub fn seed(seed: u64) {
    STATE.set(Some(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1));
}

/// Lets `one` draw for each of the seeds below `seed`, each on a thread of its own.
pub fn skip(seeds: u64, one: fn()) {
    for _ in 0..seeds {
        std::thread::spawn(one).join().expect("it does not panic");
    }
}

/// Splitmix64.
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

/// Stands before the C library's function of that name in this program.
///
/// # Safety
/// As getrandom(2): `buffer` is writable for `length` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn getrandom(buffer: *mut u8, length: usize, _flags: u32) -> isize {
    if length == 0 {
        return 0;
    }
    // SAFETY: the caller promises a buffer of that length; it is not read.
    let buffer = unsafe { std::slice::from_raw_parts_mut(buffer, length) };
    if fill(buffer) { isize::try_from(length).unwrap_or(isize::MAX) } else { -1 }
}
