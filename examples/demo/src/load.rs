//! Tools `logger`, `memhog`, and `cpuhog`: load for logs, limits, and metrics.

use std::{
    io::{self, Write},
    thread,
    time::{Duration, Instant},
};

use super::{USAGE, option};

/// Maximum line length, bytes.
const LONGEST: usize = 1 << 20;
/// Size of one allocation, bytes.
const PIECE: usize = 1 << 20;

/// Writes numbered lines: `--rate` per second (default 1; 0: unlimited), `--size` bytes each, `--count` in total;
/// `--partial` writes each in two parts.
pub fn logger(args: &[String]) -> io::Result<i32> {
    let number = |name: &str, default: u64| option(args, name).map_or(Some(default), |text| text.parse().ok());
    let (Some(rate), Some(size), Some(count)) =
        (number("--rate", 1), number("--size", 64), number("--count", u64::MAX))
    else {
        writeln!(io::stderr(), "usage: logger [--rate N] [--size BYTES] [--count N] [--partial]")?;
        return Ok(USAGE);
    };
    let size = usize::try_from(size).unwrap_or(LONGEST).min(LONGEST);
    let is_partial = args.iter().any(|arg| arg == "--partial");
    let (begin, mut out) = (Instant::now(), io::stdout().lock());
    for line in 0..count {
        let mut text = format!("line {line} ");
        while text.len() < size {
            text.push(char::from(b'a' + (text.len() % 26) as u8));
        }
        let (first, second) = text.split_at(if is_partial { text.len() / 2 } else { 0 });
        if is_partial {
            out.write_all(first.as_bytes())?;
            out.flush()?;
        }
        writeln!(out, "{second}")?;
        if let Some(due) = (line + 1).saturating_mul(1_000_000_000).checked_div(rate) {
            out.flush()?;
            thread::sleep((begin + Duration::from_nanos(due)).saturating_duration_since(Instant::now()));
        }
    }
    Ok(0)
}

/// Allocates that many MiB of memory, touches it, and keeps it.
pub fn memhog(args: &[String]) -> io::Result<i32> {
    let Some(wanted) = args.first().and_then(|text| text.parse::<usize>().ok()) else {
        writeln!(io::stderr(), "usage: memhog MIB")?;
        return Ok(USAGE);
    };
    let mut blocks: Vec<Vec<u8>> = Vec::new();
    for taken in 0..wanted {
        // Not zeros: the kernel would not have to allocate those pages.
        blocks.push(vec![(taken % 255 + 1) as u8; PIECE]);
        if (taken + 1) % 16 == 0 || taken + 1 == wanted {
            println_now(&format!("memhog: {} MiB", taken + 1))?;
        }
    }
    loop {
        thread::sleep(Duration::from_secs(60));
        // Memory that is never used again could be optimized away.
        let used: usize = blocks.iter().filter_map(|piece| piece.first()).map(|byte| usize::from(*byte)).sum();
        std::hint::black_box(used);
    }
}

/// Uses CPU for that many seconds (default: forever), in that many threads (default: one).
pub fn cpuhog(args: &[String]) -> io::Result<i32> {
    let seconds = option(args, "--seconds").and_then(|text| text.parse::<u64>().ok());
    let threads = option(args, "--threads").and_then(|text| text.parse::<u64>().ok()).unwrap_or(1).clamp(1, 256);
    let until = seconds.map(|seconds| Instant::now() + Duration::from_secs(seconds));
    let spin = move || {
        let mut value = 1u64;
        while until.is_none_or(|until| Instant::now() < until) {
            for _ in 0..100_000 {
                value = std::hint::black_box(value.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1));
            }
        }
    };
    let workers: Vec<_> = (1..threads).map(|_| thread::spawn(spin)).collect();
    spin();
    for worker in workers {
        // A worker has no code that could panic.
        let _ = worker.join();
    }
    Ok(0)
}

fn println_now(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{text}")?;
    out.flush()
}
