//! The program's own code in memory: what only the start or a burst needed need not stay mapped.
//!
//! The kernel maps files in windows of 64 KiB, so a start touches nearly all of the code and its
//! constants. Unmapping costs nothing but a minor fault per window that is still in use: the pages
//! stay in the page cache.

use std::{
    fs::File,
    io::{BufRead, BufReader},
    num::NonZeroUsize,
};

use nix::unistd;

/// Read at a time. The kernel makes up one mapping's entry for each read this small, and those behind the program's, of
/// the whole heap among them, are made up for nobody.
const READ: usize = 512;

/// A range of addresses.
#[derive(Debug, PartialEq, Eq)]
struct Range {
    start: NonZeroUsize,
    length: usize,
}

/// Unmaps the code and constants of this process's program. Takes about 0.1 ms.
pub fn unmap_code() {
    let Ok(maps) = File::open("/proc/self/smaps") else { return }; // without it nothing is unmapped
    for range in unchanged(BufReader::with_capacity(READ, maps)) {
        let start = std::ptr::with_exposed_provenance_mut(range.start.get());
        // SAFETY: the range is one mapping of this process that is backed by a file and not writable,
        // and the kernel counted no page of it that differs from the file, neither in memory nor
        // swapped out; dropping them changes no content, the next access maps them again. A refusal
        // changes nothing.
        let _done = unsafe { nix::libc::madvise(start, range.length, nix::libc::MADV_DONTNEED) };
    }
}

/// What of this process is in memory, in bytes; nothing where the kernel does not say.
pub fn resident() -> u64 {
    let pages = std::fs::read_to_string("/proc/self/statm").ok().and_then(|text| resident_pages(&text));
    let page = unistd::sysconf(unistd::SysconfVar::PAGE_SIZE).ok().flatten().and_then(|size| u64::try_from(size).ok());
    pages.unwrap_or(0).saturating_mul(page.unwrap_or(4096))
}

/// The second number of `/proc/self/statm`.
fn resident_pages(statm: &str) -> Option<u64> {
    statm.split_ascii_whitespace().nth(1)?.parse().ok()
}

/// The ranges of `/proc/self/smaps` that map the first file in it, which is the program, cannot be written, and hold
/// nothing but what is in it. Constants that the dynamic loader relocated, and code with a debugger's breakpoints, are
/// pages of their own. Reads no further than needed.
fn unchanged(maps: impl BufRead) -> Vec<Range> {
    let mut found = Vec::new();
    let (mut program, mut current, mut clean) = (None::<String>, None, 0);
    for line in maps.lines().map_while(Result::ok) {
        let mut fields = line.split_ascii_whitespace();
        match (fields.next(), fields.next()) {
            (Some("Anonymous:" | "Swap:"), Some("0")) => clean += 1,
            (Some(name), _) if name.ends_with(':') => {}
            (Some(addresses), Some(permissions)) => {
                let path = fields.nth(3).unwrap_or_default();
                if *program.get_or_insert_with(|| path.to_owned()) != path {
                    break;
                }
                (current, clean) = (range(addresses, permissions, path), 0);
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
fn range(addresses: &str, permissions: &str, path: &str) -> Option<Range> {
    if !matches!(permissions, "r-xp" | "r--p") || !path.starts_with('/') {
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

    const NAME: &str = "/usr/bin/berth";

    fn entry(head: &str, anonymous: u32, swap: u32) -> String {
        format!(
            "{head}\nSize: 1024 kB\nRss: 64 kB\nAnonymous: {anonymous} kB\nLazyFree: 0 kB\nSwap: {swap} kB\n\
             SwapPss: 0 kB\nVmFlags: rd ex mr\n"
        )
    }

    fn found(maps: &str) -> Vec<(usize, usize)> {
        unchanged(maps.as_bytes()).into_iter().map(|range| (range.start.get(), range.length)).collect()
    }

    #[test]
    fn only_what_is_as_in_its_file_is_unmapped() {
        let code = format!("56413000-56513000 r-xp 0025a000 fe:00 1234   {NAME}");
        let (range, constants) = ((0x5641_3000, 0x10_0000), code.replace("r-xp", "r--p"));
        assert_eq!(found(&entry(&code, 0, 0)), [range]);
        assert_eq!(found(&[entry(&code, 0, 0), entry(&constants, 0, 0)].concat()), [range, range], "constants");
        for (anonymous, swap) in [(4, 0), (0, 4), (8, 8)] {
            assert_eq!(found(&entry(&code, anonymous, swap)), [], "{anonymous} {swap}");
        }
        for other in [
            "56413000-56513000 rwxp 00000000 fe:00 1234 /usr/bin/berth",
            "56413000-56513000 rw-p 00000000 fe:00 1234 /usr/bin/berth",
            "56413000-56513000 r-xs 00000000 fe:00 1234 /usr/bin/berth",
            "7fff0000-7fff2000 r-xp 00000000 00:00 0 [vdso]",
            "7fff0000-7fff2000 r-xp 00000000 00:00 0",
            "56513000-56413000 r-xp 0025a000 fe:00 1234 /usr/bin/berth",
            "zz-1 r-xp 0 0 0 /x",
            "",
        ] {
            assert_eq!(found(&entry(other, 0, 0)), [], "{other}");
        }
    }

    #[test]
    fn nothing_is_read_behind_the_program() {
        let code = entry(&format!("1000-2000 r-xp 0 0 0 {NAME}"), 0, 0);
        let data = entry(&format!("2000-3000 rw-p 0 0 0 {NAME}"), 4, 0);
        let behind = entry("3000-4000 rw-p 00000000 00:00 0", 4, 0);
        let library = entry("5000-6000 r-xp 0 0 0 /lib/libc.so.6", 0, 0);
        assert_eq!(found(&[&*code, &data, &code, &behind, &code].concat()), [(0x1000, 0x1000); 2]);
        assert_eq!(found(&[&*code, &library].concat()), [(0x1000, 0x1000)]);
    }

    #[test]
    fn what_is_in_memory_is_the_second_number() {
        for (statm, expected) in
            [("7000 1234 900 10 0 80 0\n", Some(1234)), ("7000", None), ("7000 x", None), ("", None)]
        {
            assert_eq!(resident_pages(statm), expected, "{statm}");
        }
        assert!(resident() > 1 << 20);
    }

    #[test]
    fn the_program_goes_on() {
        let maps = std::fs::read_to_string("/proc/self/smaps").expect("the kernel's own");
        assert!(!found(&maps).is_empty(), "{maps}");
        unmap_code();
        assert_eq!(found(&entry("1000-2000 r-xp 0 0 0 /x", 0, 0)), [(0x1000, 0x1000)]);
    }
}
