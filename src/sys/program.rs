//! The program's own code in memory: what only the start or a burst needed need not stay mapped.
//!
//! The kernel maps files in windows of 64 KiB, so a start touches nearly all of the code and its
//! constants. Unmapping costs nothing but a minor fault per window that is still in use: the pages
//! stay in the page cache.

use std::{fs, num::NonZeroUsize};

/// A range of addresses.
#[derive(Debug, PartialEq, Eq)]
struct Range {
    start: NonZeroUsize,
    length: usize,
}

/// Unmaps the code and constants of this process, the program's and its libraries'.
pub fn unmap_code() {
    let maps = fs::read_to_string("/proc/self/smaps").unwrap_or_default(); // without it nothing is unmapped
    for range in unchanged(&maps) {
        let start = std::ptr::with_exposed_provenance_mut(range.start.get());
        // SAFETY: the range is one mapping of this process that is backed by a file and not writable,
        // and the kernel counted no page of it that differs from the file, neither in memory nor
        // swapped out; dropping them changes no content, the next access maps them again. A refusal
        // changes nothing.
        let _done = unsafe { nix::libc::madvise(start, range.length, nix::libc::MADV_DONTNEED) };
    }
}

/// The ranges of `/proc/self/smaps` that map a file, cannot be written, and hold nothing but what is in it. Constants
/// that the dynamic loader relocated, and code with a debugger's breakpoints, are pages of their own.
fn unchanged(maps: &str) -> Vec<Range> {
    let mut found = Vec::new();
    let (mut current, mut clean) = (None, 0);
    for line in maps.lines() {
        let mut fields = line.split_ascii_whitespace();
        match (fields.next(), fields.next()) {
            (Some("Anonymous:" | "Swap:"), Some("0")) => clean += 1,
            (Some(name), _) if name.ends_with(':') => {}
            (Some(addresses), Some(permissions)) => {
                (current, clean) = (range(addresses, permissions, fields.nth(3)), 0)
            }
            _ => {}
        }
        if clean == 2 {
            found.extend(current.take());
        }
    }
    found
}

/// A mapping of a file that is only read.
fn range(addresses: &str, permissions: &str, path: Option<&str>) -> Option<Range> {
    if !matches!(permissions, "r-xp" | "r--p") || !path?.starts_with('/') {
        return None;
    }
    let (start, end) = addresses.split_once('-')?;
    let start = NonZeroUsize::new(usize::from_str_radix(start, 16).ok()?)?;
    let length = usize::from_str_radix(end, 16).ok()?.checked_sub(start.get())?;
    Some(Range { start, length })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(head: &str, anonymous: u32, swap: u32) -> Vec<(usize, usize)> {
        let entry = format!(
            "{head}\nSize: 1024 kB\nRss: 64 kB\nAnonymous: {anonymous} kB\nLazyFree: 0 kB\nSwap: {swap} kB\n\
             SwapPss: 0 kB\nVmFlags: rd ex mr\n"
        );
        let all = format!("{entry}7fff0000-7fff2000 rw-p 00000000 00:00 0\nAnonymous: 0 kB\nSwap: 0 kB\n{entry}");
        unchanged(&all).into_iter().map(|range| (range.start.get(), range.length)).collect()
    }

    #[test]
    fn only_what_is_as_in_its_file_is_unmapped() {
        let code = "56413000-56513000 r-xp 0025a000 fe:00 1234   /usr/bin/berth";
        assert_eq!(found(code, 0, 0), [(0x5641_3000, 0x10_0000); 2]);
        assert_eq!(found(&code.replace("r-xp", "r--p"), 0, 0), [(0x5641_3000, 0x10_0000); 2], "constants");
        for (anonymous, swap) in [(4, 0), (0, 4), (8, 8)] {
            assert_eq!(found(code, anonymous, swap), [], "{anonymous} {swap}");
        }
        for other in [
            "56413000-56513000 rwxp 00000000 fe:00 1234 /usr/bin/berth",
            "56413000-56513000 rw-p 00000000 fe:00 1234 /usr/bin/berth",
            "56413000-56513000 r-xs 00000000 fe:00 1234 /usr/bin/berth",
            "7fff0000-7fff2000 r-xp 00000000 00:00 0 [vdso]",
            "7fff0000-7fff2000 r-xp 00000000 00:00 0",
            "56513000-56413000 r-xp 0025a000 fe:00 1234   /usr/bin/berth",
            "zz-1 r-xp 0 0 0 /x",
            "",
        ] {
            assert_eq!(found(other, 0, 0), [], "{other}");
        }
    }

    #[test]
    fn the_program_goes_on() {
        unmap_code();
        assert_eq!(found("1000-2000 r-xp 0 0 0 /x", 0, 0), [(0x1000, 0x1000); 2]);
    }
}
