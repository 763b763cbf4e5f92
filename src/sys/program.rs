//! The program's own code in memory: what only the start or a burst needed need not stay mapped.
//!
//! The kernel maps code in windows of 64 KiB, so a start touches nearly all of it. Unmapping
//! costs nothing but a minor fault per window that is still in use: the pages stay in the page
//! cache. (Breakpoints of a debugger lie in private copies of code and go with the mapping.)

use std::{fs, num::NonZeroUsize};

/// A range of addresses.
#[derive(Debug, PartialEq, Eq)]
struct Range {
    start: NonZeroUsize,
    length: usize,
}

/// Unmaps the code of this process, the program's and its libraries'.
pub fn unmap_code() {
    let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default(); // without it nothing is unmapped
    for range in maps.lines().filter_map(code) {
        let start = std::ptr::with_exposed_provenance_mut(range.start.get());
        // SAFETY: the range is one mapping of this process that is backed by a file, executable and
        // not writable, so no page of it holds anything that is not in the file; dropping them
        // changes no content, the next access maps them again. A refusal changes nothing.
        let _done = unsafe { nix::libc::madvise(start, range.length, nix::libc::MADV_DONTNEED) };
    }
}

/// The range of a line of `/proc/self/maps` that maps code of a file.
fn code(line: &str) -> Option<Range> {
    let mut fields = line.split_ascii_whitespace();
    let (addresses, permissions) = (fields.next()?, fields.next()?);
    let path = fields.nth(3)?;
    if permissions != "r-xp" || !path.starts_with('/') {
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

    #[test]
    fn only_code_of_files_is_unmapped() {
        let range = code("56413000-56513000 r-xp 0025a000 fe:00 1234   /usr/bin/berth").expect("code");
        assert_eq!((range.start.get(), range.length), (0x5641_3000, 0x10_0000));
        for other in [
            "56413000-56513000 r--p 00000000 fe:00 1234 /usr/bin/berth",
            "56413000-56513000 rwxp 00000000 fe:00 1234 /usr/bin/berth",
            "7fff0000-7fff2000 r-xp 00000000 00:00 0 [vdso]",
            "7fff0000-7fff2000 r-xp 00000000 00:00 0",
            "zz-1 r-xp 0 0 0 /x",
            "",
        ] {
            assert_eq!(code(other), None, "{other}");
        }
        unmap_code();
        assert!(code("1000-2000 r-xp 0 0 0 /x").is_some(), "the program goes on");
    }
}
