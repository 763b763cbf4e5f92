//! Memory pressure notifications: PSI triggers, memory.events.local, and cgroup v1 usage thresholds.
//!
//! Implements spec 05 §3.10, `Documentation/accounting/psi.rst`.

use std::{
    fs::{File, OpenOptions},
    io::{self, Write},
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::fs::OpenOptionsExt,
    },
    path::Path,
};

use inotify::{EventMask, EventStream, Inotify, WatchMask};
use rustix::{
    event::{EventfdFlags, eventfd},
    fs::OFlags,
    io::read,
};

use tokio_stream::StreamExt;

use super::polled_fd::PolledFd;

/// PSI triggers: stall time and window in microseconds. Without privileges the kernel accepts only windows that are
/// multiples of two seconds.
const STALLS: [&str; 2] = ["some 50000 1000000\0", "some 100000 2000000\0"];

/// Event counters of a cgroup's own limits, without those of its descendants.
const LIMITS_MET: &str = "memory.events.local";
/// Size of the event buffer for one file, bytes.
const EVENTS: usize = 1024;

/// PSI trigger: notifies when tasks stall on memory.
#[derive(Debug)]
pub struct PressureTrigger(PolledFd);

impl PressureTrigger {
    /// Registers a trigger on a PSI file (`/proc/pressure/memory`). Must be called within a runtime.
    ///
    /// # Errors
    /// If the file does not exist, or the kernel refuses the trigger.
    pub fn of(file: &Path) -> io::Result<Self> {
        let nonblock = i32::try_from(OFlags::NONBLOCK.bits()).unwrap_or_default();
        let open = || OpenOptions::new().read(true).write(true).custom_flags(nonblock).open(file);
        let mut refused = io::Error::from(io::ErrorKind::Unsupported);
        for trigger in STALLS {
            let mut opened = open()?;
            match opened.write_all(trigger.as_bytes()) {
                Ok(()) => return PolledFd::for_priority(OwnedFd::from(opened)).map(Self),
                Err(error) => refused = error,
            }
        }
        Err(refused)
    }

    /// Waits for the next notification. Cancel-safe.
    ///
    /// # Errors
    /// If the trigger no longer works.
    pub async fn next(&self) -> io::Result<()> {
        let mut guard = self.0.ready(tokio::io::Interest::PRIORITY).await?;
        let is_over = guard.ready().is_error();
        guard.clear_ready();
        if is_over { Err(io::ErrorKind::NotFound.into()) } else { Ok(()) }
    }
}

/// Watcher of a cgroup v2: notifies when it reaches one of its memory limits.
pub struct CgroupMemoryEvents(EventStream<Vec<u8>>);

impl CgroupMemoryEvents {
    /// Watches the cgroup of that directory. Must be called within a runtime.
    ///
    /// # Errors
    /// If the cgroup does not exist, or no inotify watch is available.
    pub fn of(group: &Path) -> io::Result<Self> {
        let inotify = Inotify::init()?;
        inotify.watches().add(group.join(LIMITS_MET), WatchMask::MODIFY)?;
        Ok(Self(inotify.into_event_stream(vec![0; EVENTS])?))
    }

    /// Waits for the next event. Cancel-safe.
    ///
    /// # Errors
    /// If the cgroup is gone, or the inotify descriptor fails.
    pub async fn next(&mut self) -> io::Result<()> {
        match self.0.next().await {
            Some(Ok(event)) if !event.mask.contains(EventMask::IGNORED) => Ok(()),
            Some(Ok(_)) | None => Err(io::ErrorKind::NotFound.into()),
            Some(Err(error)) => Err(error),
        }
    }
}

/// Usage threshold of a cgroup v1: notifies when memory usage crosses it in either direction.
#[derive(Debug)]
pub struct UsageThreshold(CgroupEventFd);

impl UsageThreshold {
    /// Sets a threshold in bytes for the cgroup of that directory. Must be called within a runtime.
    ///
    /// # Errors
    /// If the cgroup does not exist, or the kernel refuses the threshold.
    pub fn set(group: &Path, bytes: u64) -> io::Result<Self> {
        CgroupEventFd::of(group, "memory.usage_in_bytes", &format!(" {bytes}")).map(Self)
    }

    /// Waits until usage crosses the threshold. Cancel-safe.
    ///
    /// # Errors
    /// If the eventfd fails.
    pub async fn next(&self) -> io::Result<()> {
        self.0.next().await
    }
}

/// Eventfd of a cgroup v1 notification; the kernel also signals it when the cgroup is removed.
#[derive(Debug)]
pub(super) struct CgroupEventFd(PolledFd);

impl CgroupEventFd {
    /// Registers for the notifications of a cgroup file; `arguments` begin with a blank.
    pub(super) fn of(group: &Path, file: &str, arguments: &str) -> io::Result<Self> {
        let counter = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let of = File::open(group.join(file))?;
        let registration = format!("{} {}{arguments}", counter.as_raw_fd(), of.as_raw_fd());
        OpenOptions::new().write(true).open(group.join("cgroup.event_control"))?.write_all(registration.as_bytes())?;
        PolledFd::new(counter).map(Self)
    }

    /// Waits for the next notification. Cancel-safe.
    pub(super) async fn next(&self) -> io::Result<()> {
        loop {
            let mut guard = self.0.readable().await?;
            let taken = guard.try_io(|counter| {
                let mut events = [0_u8; 8];
                Ok(read(counter.get_ref(), &mut events)?)
            });
            if let Ok(taken) = taken {
                return taken.map(drop);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, process::Command, time::Duration};

    use super::*;

    #[tokio::test]
    async fn an_unusable_file_is_an_error() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        assert!(PressureTrigger::of(file.path()).is_err(), "no pressure file");
        assert!(PressureTrigger::of(Path::new("/no/such/file")).is_err());
        assert!(UsageThreshold::set(Path::new("/no/such/group"), 1).is_err());
    }

    #[tokio::test]
    async fn a_cgroup_at_its_limit_is_reported_until_it_is_removed() {
        let group = tempfile::tempdir().expect("a folder");
        assert!(CgroupMemoryEvents::of(group.path()).is_err(), "no such file");
        let file = group.path().join(LIMITS_MET);
        fs::write(&file, "max 0\n").expect("written");
        let mut events = CgroupMemoryEvents::of(group.path()).expect("watched");
        fs::write(&file, "max 1\n").expect("written");
        let patience = Duration::from_secs(60);
        tokio::time::timeout(patience, events.next()).await.expect("in time").expect("received");
        fs::remove_file(&file).expect("removed");
        let until_gone = async { while events.next().await.is_ok() {} };
        tokio::time::timeout(patience, until_gone).await.expect("the removal is reported");
    }

    #[tokio::test]
    async fn this_kernel_reports_stalls_if_it_counts_them() {
        let file = Path::new("/proc/pressure/memory");
        if OpenOptions::new().write(true).open(file).is_err() {
            println!("skipped: this_kernel_reports_stalls_if_it_counts_them: no {}", file.display());
            return;
        }
        let stalls = PressureTrigger::of(file).expect("watched");
        // The machine may stall during the test: what matters is that the wait neither fails nor spins.
        let outcome = tokio::time::timeout(Duration::from_millis(10), stalls.next()).await;
        assert!(outcome.is_err() || outcome.is_ok_and(|result| result.is_ok()));
    }

    #[tokio::test]
    async fn a_cgroup_over_its_threshold_is_reported() {
        let test = "a_cgroup_over_its_threshold_is_reported";
        let group = Path::new("/sys/fs/cgroup/memory").join(format!("berth-line-{}", std::process::id()));
        if fs::create_dir(&group).is_err() {
            println!("skipped: {test}: needs root and the old hierarchy of memory");
            return;
        }
        let line = UsageThreshold::set(&group, 8 << 20).expect("drawn");
        let quiet = tokio::time::timeout(Duration::from_millis(10), line.next()).await;
        let script = format!(
            "echo $$ > {}/cgroup.procs && head -c 33554432 /dev/zero | tail -c 33554432 | wc -c",
            group.display()
        );
        let used = Command::new("sh").arg("-c").arg(script).output().expect("a shell");
        let notification = tokio::time::timeout(Duration::from_secs(60), line.next()).await;
        drop(line);
        // Its processes have exited; the kernel may need a moment.
        for _ in 0..100 {
            if fs::remove_dir(&group).is_ok() {
                break;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        assert!(used.status.success(), "{used:?}");
        assert!(quiet.is_err(), "nothing is in use");
        notification.expect("notified in time").expect("a kernel notification");
    }
}
