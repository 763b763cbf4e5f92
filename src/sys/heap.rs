//! The allocator's habits, set for an agent that is small and mostly idle.
//!
//! glibc gives each thread an arena of its own, up to eight per CPU, and keeps what was freed
//! in them: after a burst of starts that is more than all that is in use. One arena is enough for
//! two workers that mostly wait, its holes are filled by whoever comes next, and what is free is
//! given back when things have calmed down.

use nix::sys::resource::{UsageWho, getrusage};

/// One for all threads: a second one doubles the holes that nobody can give back.
#[cfg(target_env = "gnu")]
const ARENAS: i32 = 1;

/// Call once, before the first thread is started.
pub fn tune() {
    #[cfg(target_env = "gnu")]
    {
        // SAFETY: mallopt takes two integers and reads no memory of ours; it is called while this
        // is the only thread. A refusal (0) leaves the default, which works too.
        let _kept = unsafe { nix::libc::mallopt(nix::libc::M_ARENA_MAX, ARENAS) };
    }
}

/// Gives free memory back to the kernel. Takes about a millisecond per 10 MB.
pub fn give_back() {
    #[cfg(target_env = "gnu")]
    {
        // SAFETY: malloc_trim takes an integer, locks each arena in turn, and releases only pages
        // that hold no allocation; it may be called from any thread at any time.
        let _released = unsafe { nix::libc::malloc_trim(0) };
    }
}

/// How often this process has touched a page that it did not have yet.
pub fn page_faults() -> u64 {
    let usage = getrusage(UsageWho::RUSAGE_SELF);
    usage.map_or(0, |usage| u64::try_from(usage.minor_page_faults()).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_memory_shows_as_faults() {
        let before = page_faults();
        // Other tests may have left some that is touched already, but not without end.
        let mut kept = Vec::new();
        while page_faults() == before && kept.len() < 64 {
            kept.push(std::hint::black_box(vec![1_u8; 4 << 20]));
        }
        assert!(page_faults() > before);
        drop(kept);
        give_back();
    }
}
