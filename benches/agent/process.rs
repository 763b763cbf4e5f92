//! Process statistics from /proc: memory, CPU time, threads, and descriptors.

use std::{fs, path::Path};

use anyhow::{Context, Result};

use crate::figures::Samples;

/// Resident memory (RSS) in megabytes (10^6 bytes), shared pages included.
pub fn resident(pid: u32) -> Result<f64> {
    of_all_mappings(pid, "Rss:")
}

/// Anonymous memory in megabytes (10^6 bytes): heap, stacks, and changed data, which no other process shares.
pub fn anonymous(pid: u32) -> Result<f64> {
    of_all_mappings(pid, "Anonymous:")
}

/// Adds RSS, PSS, and anonymous memory as samples of those keys.
pub fn add_memory(samples: &mut Samples, pid: u32, [rss, pss, anonymous]: [&'static str; 3]) -> Result<()> {
    samples.add(rss, resident(pid)?);
    samples.add(pss, proportional(pid)?);
    samples.add(anonymous, self::anonymous(pid)?);
    Ok(())
}

/// Proportional memory (PSS) in megabytes (10^6 bytes): shared pages count by share.
pub fn proportional(pid: u32) -> Result<f64> {
    of_all_mappings(pid, "Pss:")
}

fn of_all_mappings(pid: u32, field: &str) -> Result<f64> {
    let text = read(pid, "smaps_rollup")?;
    let line =
        text.lines().find(|l| l.starts_with(field)).with_context(|| format!("{field} not found in smaps_rollup"))?;
    let kib: f64 = line.split_whitespace().nth(1).with_context(|| format!("{field} has no value"))?.parse()?;
    Ok(kib * 1024.0 / 1e6)
}

/// User and system CPU time so far, in seconds.
pub fn cpu_seconds(pid: u32) -> Result<f64> {
    let text = read(pid, "stat")?;
    // The process name may contain blanks; the fields after its closing parenthesis do not.
    let fields: Vec<&str> = text.rsplit_once(") ").context("no command name in /proc/PID/stat")?.1.split(' ').collect();
    let ticks =
        |at: usize| -> Result<f64> { Ok(fields.get(at).context("/proc/PID/stat has too few fields")?.parse()?) };
    Ok((ticks(11)? + ticks(12)?) / per_second()?)
}

fn per_second() -> Result<f64> {
    let ticks = nix::unistd::sysconf(nix::unistd::SysconfVar::CLK_TCK)?.context("no clock tick")?;
    Ok(f64::from(u32::try_from(ticks)?))
}

/// Busy CPU time of the whole machine so far, in seconds: attributes work that is spread over many processes, on an
/// otherwise idle machine.
pub fn busy_seconds() -> Result<f64> {
    let text = fs::read_to_string("/proc/stat")?;
    let line = text.lines().next().context("/proc/stat is empty")?;
    let ticks: Vec<f64> = line.split_whitespace().skip(1).map(str::parse).collect::<Result<_, _>>()?;
    // user, nice, system, then (skipping idle and iowait) irq and softirq.
    let busy = [0, 1, 2, 5, 6].iter().filter_map(|&at| ticks.get(at)).sum::<f64>();
    Ok(busy / per_second()?)
}

/// Number of threads.
pub fn threads(pid: u32) -> Result<usize> {
    entries(pid, "task")
}

/// Number of open file descriptors.
pub fn descriptors(pid: u32) -> Result<usize> {
    entries(pid, "fd")
}

fn read(pid: u32, file: &str) -> Result<String> {
    let path = format!("/proc/{pid}/{file}");
    fs::read_to_string(&path).with_context(|| format!("cannot read {path}: has the process exited?"))
}

fn entries(pid: u32, folder: &str) -> Result<usize> {
    let path = format!("/proc/{pid}/{folder}");
    Ok(fs::read_dir(Path::new(&path)).with_context(|| format!("cannot read {path}: has the process exited?"))?.count())
}
