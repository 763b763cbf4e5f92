//! Heap profiler: jemalloc's sampling of allocations, off until its first use.
//!
//! Off, it costs a branch per allocation. On, jemalloc samples one block per 512 KiB of allocations on average
//! (exponentially distributed, so that no pattern hides) with its stack, and sums up per stack all sampled blocks and
//! the live ones. Sampling is never switched off again: a process that was profiled once is likely to be profiled again.

use std::{
    ffi::{CStr, CString},
    fs::File,
    io::{self, Read},
    os::fd::AsRawFd,
};

use rustix::fs::MemfdFlags;

use super::jemalloc;

/// Average number of bytes between two samples; `lg_prof_sample` of jemalloc's options.
pub const SAMPLE_INTERVAL: u64 = 512 << 10;

/// Number of blocks and their total size.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct BlockSum {
    /// Number of blocks.
    pub blocks: u64,
    /// Total bytes.
    pub bytes: u64,
}

/// Samples of one stack since sampling began.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HeapSample {
    /// Return addresses, innermost first; the first ones are the allocator's own.
    pub frames: Vec<u64>,
    /// Sampled allocations.
    pub allocated: BlockSum,
    /// Sampled allocations that are not freed.
    pub live: BlockSum,
}

/// Starts sampling permanently; returns false if it had started before.
///
/// # Errors
/// If jemalloc refuses.
pub fn start() -> io::Result<bool> {
    jemalloc::tune();
    let (mut was_active, mut size, mut active) = (false, size_of::<bool>(), true);
    let (old, new) = ((&raw mut was_active).cast(), (&raw mut active).cast());
    // SAFETY: the control reads and writes a bool.
    let code = unsafe { tikv_jemalloc_sys::mallctl(c"prof.active".as_ptr(), old, &raw mut size, new, size) };
    done(code).map(|()| !was_active)
}

/// All samples since sampling began; empty before.
///
/// # Errors
/// If jemalloc writes no dump, or one that cannot be read.
pub fn samples() -> io::Result<Vec<HeapSample>> {
    let mut dump = File::from(rustix::fs::memfd_create("heap-profile", MemfdFlags::CLOEXEC)?);
    dump_to(&CString::new(format!("/proc/self/fd/{}", dump.as_raw_fd()))?)?;
    let mut text = String::new();
    dump.read_to_string(&mut text)?;
    parse(&text).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "invalid heap profile of jemalloc"))
}

fn dump_to(path: &CStr) -> io::Result<()> {
    let mut path = path.as_ptr();
    let (new, size) = ((&raw mut path).cast(), size_of_val(&path));
    let none = std::ptr::null_mut();
    // SAFETY: the control reads a pointer to a path that ends with a zero, and neither keeps nor changes it.
    done(unsafe { tikv_jemalloc_sys::mallctl(c"prof.dump".as_ptr(), none, none.cast(), new, size) })
}

fn done(code: i32) -> io::Result<()> {
    if code == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(code)) }
}

/// Reads jemalloc's `heap_v2` format: per stack a line `@ ADDRESS…`, then one of live and, in brackets, allocated blocks
/// and bytes of all threads (`t*`), then one per thread.
fn parse(dump: &str) -> Option<Vec<HeapSample>> {
    let (mut samples, mut stack) = (Vec::new(), None);
    for line in dump.strip_prefix("heap_v2/")?.lines() {
        if let Some(addresses) = line.strip_prefix("@ ") {
            stack = Some(addresses);
        } else if let Some(counts) = line.trim_start().strip_prefix("t*: ")
            && let Some(addresses) = stack.take()
        {
            let hex = |word: &str| u64::from_str_radix(word.strip_prefix("0x")?, 16).ok();
            let words = counts.split(|c: char| !c.is_ascii_digit()).filter(|word| !word.is_empty());
            let counts: Vec<u64> = words.map(str::parse).collect::<Result<_, _>>().ok()?;
            let [live_blocks, live_bytes, blocks, bytes] = counts[..] else { return None };
            samples.push(HeapSample {
                frames: addresses.split_ascii_whitespace().map(hex).collect::<Option<_>>()?,
                allocated: BlockSum { blocks, bytes },
                live: BlockSum { blocks: live_blocks, bytes: live_bytes },
            });
        }
    }
    Some(samples)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dump_is_parsed_by_stack() {
        let dump = "heap_v2/524288\n  t*: 3: 24 [5: 40]\n  t0: 3: 24 [5: 40]\n@ 0x10 0x2f\n  t*: 1: 8 [2: 16]\n  \
                    t0: 1: 8 [2: 16]\n@ 0x30\n  t*: 2: 16 [3: 24]\n\nMAPPED_LIBRARIES:\n0010-0020 r-xp 00000000 00:00 0\n";
        let sum = |blocks, bytes| BlockSum { blocks, bytes };
        let sample = |frames: &[u64], allocated, live| HeapSample { frames: frames.to_vec(), allocated, live };
        let expected = [sample(&[0x10, 0x2f], sum(2, 16), sum(1, 8)), sample(&[0x30], sum(3, 24), sum(2, 16))];
        assert_eq!(parse(dump).as_deref(), Some(&expected[..]));
        assert_eq!(parse("heap_v2/524288\n  t*: 0: 0 [0: 0]\n"), Some(Vec::new()));
        for invalid in ["", "heap\n", "heap_v2/1\n@ 0xx\n t*: 1: 1 [1: 1]\n", "heap_v2/1\n@ 0x1\n t*: 1: 1\n"] {
            assert_eq!(parse(invalid), None, "{invalid}");
        }
    }

    #[test]
    fn sampling_starts_once() {
        assert!(start().expect("jemalloc profiles"));
        assert!(!start().expect("jemalloc profiles"));
        assert!(samples().is_ok());
    }
}
