//! Host interface for storage: runs mount helpers and other programs, and reads the mount table.
//!
//! A program that exceeds its deadline is killed with its process group, and the caller does not wait for its exit:
//! when its server is unreachable, the program may not even be killable. Until the program is gone it keeps the
//! volume's permit, so that no second program hangs beside it. The mount table shows what is mounted without contacting
//! any server. Implements spec 07 §14, §17.

use std::{
    ffi::OsString,
    io,
    path::{Path, PathBuf},
    process::{ExitStatus, Stdio},
    sync::Arc,
    time::Duration,
};

use async_trait::async_trait;
use rustix::process::{Pid, Signal, kill_process_group};
use tokio::{
    io::{AsyncRead, AsyncReadExt},
    process::{Child, Command},
    sync::oneshot,
    time::{sleep, timeout},
};

use super::{attachable::OpError, local, operation::Operation};
use berth_sys::mount_table::{self, Mount};
use berth_types::cut_at_char;

/// Maximum bytes kept of each of a program's two outputs.
const KEPT: u64 = 16 * 1024;
/// Maximum bytes of program output in an error message.
const SHOWN: usize = 1024;
/// How long to read the outputs of an exited program: a descendant may keep the pipes open indefinitely.
const OUTPUT_GRACE: Duration = Duration::from_secs(1);
/// Maximum mounts stacked on one mount point that are unmounted.
const STACKED: usize = 16;

/// Exit status and output of a program that ended by itself or by a signal.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ProgramExit {
    /// Exit code; `None` where a signal terminated it.
    pub code: Option<i32>,
    /// Exit status as text: `exit status 32`, `signal: 9`.
    pub how: String,
    /// Both outputs, stdout then stderr, trimmed.
    pub output: String,
}

impl ProgramExit {
    /// Whether the exit code is 0.
    pub fn is_success(&self) -> bool {
        self.code == Some(0)
    }
}

/// Error where the exit of a program is unknown.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum RunError {
    /// The program is missing or cannot be started.
    #[error("{0}")]
    NotStarted(String),
    /// The program did not exit within its time limit and was killed.
    #[error("timed out after {0:?}")]
    TimedOut(Duration),
    /// The operation was canceled and the program killed.
    #[error("context canceled")]
    Canceled,
}

/// When to kill a running program.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum KillPolicy {
    /// Never: a file system must not be left half created.
    Never,
    /// After this duration, or when the agent stops, but not when the operation is canceled: the program tears
    /// something down.
    Within(Duration),
    /// After this duration, or when the operation is canceled or the agent stops.
    UnlessCanceled(Duration),
}

/// Host operations that storage code needs; replaced by a fake in tests.
#[async_trait]
pub trait HostOperations: Send + Sync + 'static {
    /// Runs a program from the search path for an operation; the program keeps the operation's permit until it is gone.
    ///
    /// # Errors
    /// If the program cannot be started, or was killed.
    async fn run(
        &self,
        operation: &Operation,
        program: &str,
        arguments: &[String],
        ends: KillPolicy,
    ) -> Result<ProgramExit, RunError>;

    /// Returns the mount table, in mount order.
    ///
    /// # Errors
    /// If the table cannot be read.
    fn mounts(&self) -> io::Result<Vec<Mount>>;

    /// Bind-mounts a directory on another path. Blocking.
    ///
    /// # Errors
    /// The kernel's error, or an option that a bind mount does not support.
    fn bind(&self, source: &Path, target: &Path, read_only: bool, options: &[String]) -> Result<(), OpError>;
}

/// The host this agent runs on.
#[derive(Clone, Debug, Default)]
pub struct ThisMachine {
    /// Search path for programs; `None` uses the agent's own `PATH`.
    path: Option<OsString>,
}

impl ThisMachine {
    /// Creates a host with another program search path.
    pub fn with_path(path: impl Into<OsString>) -> Self {
        Self { path: Some(path.into()) }
    }
}

/// Process group of a program; killed on drop unless the program has exited.
struct ProcessGroup(Option<Pid>);

impl ProcessGroup {
    fn of(child: &Child) -> Self {
        Self(child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw))
    }
}

impl Drop for ProcessGroup {
    fn drop(&mut self) {
        if let Some(group) = self.0 {
            // The process group may have exited already.
            let _ = kill_process_group(group, Signal::KILL);
        }
    }
}

/// Formats an exit status as the upstream kubelet does.
fn how(status: ExitStatus) -> String {
    use std::os::unix::process::ExitStatusExt;
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit status {code}"),
        (None, Some(signal)) => format!("signal: {signal}"),
        (None, None) => "no exit status".to_owned(),
    }
}

/// Reads up to `KEPT` bytes and discards the rest, so that the writer does not block.
async fn read(from: Option<impl AsyncRead + Unpin>, into: &mut Vec<u8>) {
    if let Some(mut from) = from {
        // A read error ends the output like end of file.
        let _ = (&mut from).take(KEPT).read_to_end(into).await;
        let _ = tokio::io::copy(&mut from, &mut tokio::io::sink()).await;
    }
}

/// Waits for a program and returns its output and exit status.
async fn wait_with_output(child: &mut Child) -> io::Result<ProgramExit> {
    let (out, err) = (child.stdout.take(), child.stderr.take());
    let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
    let status = {
        let reading = async { tokio::join!(read(out, &mut stdout), read(err, &mut stderr)) };
        tokio::pin!(reading);
        tokio::select! {
            _ = &mut reading => child.wait().await?,
            status = child.wait() => {
                let _ = timeout(OUTPUT_GRACE, &mut reading).await;
                status?
            }
        }
    };
    stdout.append(&mut stderr);
    let output = String::from_utf8_lossy(&stdout).trim().to_owned();
    Ok(ProgramExit { code: status.code(), how: how(status), output })
}

/// Waits until the program must be killed; returns the reason.
async fn kill_reason(operation: &Operation, ends: KillPolicy) -> RunError {
    let (limit, is_undoing) = match ends {
        KillPolicy::Never => return std::future::pending().await,
        KillPolicy::Within(limit) => (limit, true),
        KillPolicy::UnlessCanceled(limit) => (limit, false),
    };
    tokio::select! {
        biased;
        () = operation.deps().stop.cancelled() => RunError::Canceled,
        () = operation.deps().canceled.cancelled(), if !is_undoing => RunError::Canceled,
        () = sleep(limit) => RunError::TimedOut(limit),
    }
}

/// Reports the exit of a program, and keeps the operation until the program is gone.
async fn supervise(
    operation: Operation,
    mut child: Child,
    ends: KillPolicy,
    sender: oneshot::Sender<Result<io::Result<ProgramExit>, RunError>>,
) {
    let mut group = if ends == KillPolicy::Never { ProcessGroup(None) } else { ProcessGroup::of(&child) };
    let done = tokio::select! {
        biased;
        ended = wait_with_output(&mut child) => Ok(ended),
        error = kill_reason(&operation, ends) => Err(error),
        // A program that is never killed outlives the agent.
        () = operation.deps().stop.cancelled(), if ends == KillPolicy::Never => return,
    };
    let is_over = done.is_ok();
    if is_over {
        group.0 = None;
    }
    drop(group);
    // The receiver may be gone: its operation may have ended.
    let _ = sender.send(done);
    if !is_over {
        let _ = operation.deps().stop.run_until_cancelled(child.wait()).await;
    }
}

#[async_trait]
impl HostOperations for ThisMachine {
    async fn run(
        &self,
        operation: &Operation,
        program: &str,
        arguments: &[String],
        ends: KillPolicy,
    ) -> Result<ProgramExit, RunError> {
        let mut command = Command::new(program);
        command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.kill_on_drop(ends != KillPolicy::Never).process_group(0);
        if let Some(path) = &self.path {
            command.env("PATH", path);
        }
        let failed = |error: io::Error| match error.kind() {
            io::ErrorKind::NotFound => format!("exec: {program:?}: executable file not found in $PATH"),
            _ => format!("exec: {program:?}: {error}"),
        };
        let child = command.spawn().map_err(|error| RunError::NotStarted(failed(error)))?;
        let (sender, receiver) = oneshot::channel();
        operation.deps().tasks.spawn(supervise(operation.clone(), child, ends, sender));
        let done = receiver.await.map_err(|_| RunError::Canceled)?;
        done?.map_err(|error| RunError::NotStarted(failed(error)))
    }

    fn mounts(&self) -> io::Result<Vec<Mount>> {
        mount_table::read()
    }

    fn bind(&self, source: &Path, target: &Path, read_only: bool, options: &[String]) -> Result<(), OpError> {
        let bound = rustix::mount::mount_bind(source, target);
        bound.map_err(|error| OpError::failed(format!("bind mounting at {}: {error}", target.display())))?;
        local::restrict(target, read_only, options)
    }
}

/// Host access within one operation.
#[derive(Clone)]
pub struct Work {
    machine: Arc<dyn HostOperations>,
    operation: Operation,
}

impl Work {
    /// Creates host access for an operation.
    pub fn new(machine: &Arc<dyn HostOperations>, operation: &Operation) -> Self {
        Self { machine: machine.clone(), operation: operation.clone() }
    }

    /// Operation that programs and blocking calls run for.
    pub fn operation(&self) -> &Operation {
        &self.operation
    }

    /// Host interface in use.
    pub fn machine(&self) -> &Arc<dyn HostOperations> {
        &self.machine
    }

    /// Runs a program within the operation.
    ///
    /// # Errors
    /// As [`HostOperations::run`].
    pub async fn run(&self, program: &str, arguments: &[String], ends: KillPolicy) -> Result<ProgramExit, RunError> {
        self.machine.run(&self.operation, program, arguments, ends).await
    }

    /// Returns the mount table, read on a thread that may block.
    ///
    /// # Errors
    /// If the table cannot be read.
    pub async fn mounts(&self) -> Result<Vec<Mount>, OpError> {
        let machine = self.machine.clone();
        self.operation.blocking(move || machine.mounts().map_err(mount_table_error)).await
    }

    /// Whether something is mounted exactly at that path.
    ///
    /// # Errors
    /// If the table cannot be read.
    pub async fn is_mounted(&self, path: &Path) -> Result<bool, OpError> {
        Ok(self.mounts().await?.iter().any(|mount| mount.target == path))
    }
}

/// Converts a failure to read the mount table into a transient error.
pub fn mount_table_error(error: io::Error) -> OpError {
    OpError::transient(format!("reading mount table: {error}"))
}

/// Returns other mount points of the device that is mounted at the path. Pure.
pub fn elsewhere<'a>(table: &'a [Mount], path: &Path) -> Vec<&'a PathBuf> {
    let Some(own) = table.iter().rfind(|mount| mount.target == path) else { return Vec::new() };
    table.iter().filter(|mount| mount.device == own.device && mount.target != path).map(|mount| &mount.target).collect()
}

/// Merges mount options for `mount`: sorted, without duplicates. Pure.
pub fn options(given: &[String], ours: &[&str]) -> Vec<String> {
    let all = given.iter().cloned().chain(ours.iter().map(|option| (*option).to_owned()));
    let all: std::collections::BTreeSet<String> = all.filter(|option| !option.is_empty()).collect();
    all.into_iter().collect()
}

/// Returns the arguments of `mount`. Pure.
pub fn mount_arguments(kind: &str, options: &[String], source: &str, target: &Path) -> Vec<String> {
    let mut all = vec!["-t".to_owned(), kind.to_owned()];
    if !options.is_empty() {
        all.extend(["-o".to_owned(), options.join(",")]);
    }
    all.extend([source.to_owned(), target.display().to_string()]);
    all
}

/// Formats the error of a failed mount. Pure.
pub fn mount_failed(how: &str, program: &str, arguments: &[String], output: &str) -> String {
    let (arguments, output) = (arguments.join(" "), cut_at_char(output, SHOWN));
    format!("mount failed: {how}\nMounting command: {program}\nMounting arguments: {arguments}\nOutput: {output}")
}

/// Formats the error of a failed unmount. Pure.
fn unmount_failed(how: &str, arguments: &[String], output: &str) -> String {
    let (arguments, output) = (arguments.join(" "), cut_at_char(output, SHOWN));
    format!("unmount failed: {how}\nUnmounting arguments: {arguments}\nOutput: {output}")
}

/// Unmount attempts, each made where the previous one timed out: plain, forced (aborts pending server requests), and
/// lazy (detaches what cannot be ended).
const UNMOUNTS: [(Option<&str>, Duration); 3] =
    [(None, Duration::from_secs(60)), (Some("-f"), Duration::from_secs(30)), (Some("-l"), Duration::from_secs(10))];

impl Work {
    /// Unmounts everything mounted at a path, without accessing the file system itself.
    ///
    /// # Errors
    /// With the message of the upstream kubelet.
    pub async fn unmount(&self, path: &Path) -> Result<(), String> {
        for _ in 0..STACKED {
            if !self.is_mounted(path).await.map_err(|error| error.text)? {
                return Ok(());
            }
            self.unmount_once(path).await?;
        }
        if self.is_mounted(path).await.map_err(|error| error.text)? {
            return Err(format!("{} is still mounted", path.display()));
        }
        Ok(())
    }

    async fn unmount_once(&self, path: &Path) -> Result<(), String> {
        let mut late = String::new();
        for (force, limit) in UNMOUNTS {
            let arguments: Vec<String> =
                force.map(str::to_owned).into_iter().chain([path.display().to_string()]).collect();
            match self.run("umount", &arguments, KillPolicy::Within(limit)).await {
                Ok(ended) if ended.is_success() => return Ok(()),
                // The mount may be gone despite the error.
                Ok(ended) => {
                    if self.is_mounted(path).await.unwrap_or(true) {
                        return Err(unmount_failed(&ended.how, &arguments, &ended.output));
                    }
                    return Ok(());
                }
                Err(error @ RunError::TimedOut(_)) => {
                    late = unmount_failed(&error.to_string(), &arguments, "");
                    tracing::warn!(path = %path.display(), ?limit, "Unmount timed out");
                }
                Err(error) => return Err(unmount_failed(&error.to_string(), &arguments, "")),
            }
        }
        if self.is_mounted(path).await.unwrap_or(true) { Err(late) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{operation::OperationDeps, testing::FakeMachine};

    const LIMIT: KillPolicy = KillPolicy::UnlessCanceled(Duration::from_secs(60));

    fn script(text: &str) -> Vec<String> {
        vec!["-c".to_owned(), text.to_owned()]
    }

    fn work(fake: &Arc<FakeMachine>) -> Work {
        let machine: Arc<dyn HostOperations> = fake.clone();
        Work::new(&machine, &Operation::default())
    }

    #[tokio::test]
    async fn a_program_returns_its_exit_status_and_output() {
        let machine = ThisMachine::default();
        let ended = machine
            .run(&Operation::default(), "sh", &script("echo out; echo err >&2; exit 32"), LIMIT)
            .await
            .expect("ended");
        assert_eq!((ended.code, ended.how.as_str(), ended.is_success()), (Some(32), "exit status 32", false));
        assert_eq!(ended.output, "out\nerr");
        let ended = machine.run(&Operation::default(), "sh", &script("kill -9 $$"), LIMIT).await.expect("ended");
        assert_eq!((ended.code, ended.how.as_str()), (None, "signal: 9"));
        let missing = machine.run(&Operation::default(), "no-such-program", &[], LIMIT).await.expect_err("not there");
        assert_eq!(missing.to_string(), "exec: \"no-such-program\": executable file not found in $PATH");
    }

    #[tokio::test]
    async fn long_output_is_cut_and_a_background_child_does_not_delay_the_end() {
        let machine = ThisMachine::default();
        let ended = machine
            .run(&Operation::default(), "sh", &script("head -c 1000000 /dev/zero | tr '\\0' x"), LIMIT)
            .await
            .expect("ended");
        assert_eq!(ended.output.len(), usize::try_from(KEPT).expect("small"));
        // A helper's daemon that keeps its outputs open.
        let ended =
            machine.run(&Operation::default(), "sh", &script("echo up; sleep 7 & exit 0"), LIMIT).await.expect("ended");
        assert_eq!((ended.is_success(), ended.output.as_str()), (true, "up"));
    }

    #[tokio::test]
    async fn what_hangs_is_killed_with_what_it_started() {
        let dir = tempfile::tempdir().expect("a directory");
        let pid = dir.path().join("pid");
        let ends = KillPolicy::Within(Duration::from_millis(500));
        let hangs = format!("sleep 1000 & echo $! > {}; wait", pid.display());
        let run = ThisMachine::default().run(&Operation::default(), "sh", &script(&hangs), ends).await;
        assert_eq!(run, Err(RunError::TimedOut(Duration::from_millis(500))));
        // On a loaded machine the script may not have started its child: then there is nothing to kill.
        let Ok(child) = std::fs::read_to_string(&pid) else { return };
        let stat = PathBuf::from(format!("/proc/{}/stat", child.trim()));
        let is_alive = || std::fs::read_to_string(&stat).is_ok_and(|text| !text.contains(") Z "));
        let until = std::time::Instant::now() + Duration::from_secs(60);
        while is_alive() {
            assert!(std::time::Instant::now() < until, "still there");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    #[tokio::test]
    async fn a_canceled_program_is_killed_and_keeps_its_permit_until_it_is_gone() {
        let turn = Arc::new(tokio::sync::Semaphore::new(1));
        let operation = Operation::new(turn.clone().try_acquire_owned().expect("free"), OperationDeps::default());
        operation.deps().canceled.cancel();
        let machine = ThisMachine::default();
        let killed = machine.run(&operation, "sh", &script("sleep 1000"), LIMIT).await;
        assert_eq!(killed, Err(RunError::Canceled));
        // A teardown program ignores the cancellation.
        let limit = KillPolicy::Within(Duration::from_secs(60));
        let ended = machine.run(&operation, "sh", &script("echo undone"), limit).await.expect("ended");
        assert_eq!(ended.output, "undone");
        drop(operation);
        let free = timeout(Duration::from_secs(60), turn.acquire()).await;
        assert!(free.is_ok(), "all of it is gone");
    }

    #[tokio::test]
    async fn unmounting_goes_as_far_as_it_has_to() {
        let path = Path::new("/v");
        for (hangs, calls, expected) in [
            (0, &["umount /v"][..], Ok(())),
            (1, &["umount /v", "umount -f /v"], Ok(())),
            (2, &["umount /v", "umount -f /v", "umount -l /v"], Ok(())),
            (3, &["umount /v", "umount -f /v", "umount -l /v"], Err(())),
        ] {
            let fake = FakeMachine::new();
            fake.mount("nfs", path);
            (0..hangs).for_each(|_| fake.next("umount", Err(RunError::TimedOut(Duration::ZERO))));
            let work = work(&fake);
            assert_eq!(work.unmount(path).await.map_err(drop), expected, "{hangs}");
            assert_eq!(fake.calls(), calls, "{hangs}");
        }
        let fake = FakeMachine::new();
        let work = work(&fake);
        work.unmount(path).await.expect("nothing there");
        assert!(fake.calls().is_empty());
        // Stacked mounts.
        fake.mount("nfs", path);
        fake.mount("nfs", path);
        work.unmount(path).await.expect("unmounted");
        assert_eq!(fake.calls().len(), 2);
    }

    #[tokio::test]
    async fn a_mount_in_use_is_not_taken_away() {
        let fake = FakeMachine::new();
        fake.mount("nfs", Path::new("/v"));
        fake.next("umount", Ok((32, "umount: /v: target is busy.")));
        let work = work(&fake);
        let error = work.unmount(Path::new("/v")).await.expect_err("busy");
        let text = "unmount failed: exit status 32\nUnmounting arguments: /v\nOutput: umount: /v: target is busy.";
        assert_eq!(error, text);
        assert_eq!(fake.calls(), ["umount /v"]);
    }

    #[test]
    fn mount_options_are_sorted_without_duplicates() {
        let given = ["noatime", "ro", "", "hard"].map(str::to_owned);
        assert_eq!(options(&given, &["ro", "bind"]), ["bind", "hard", "noatime", "ro"]);
        let arguments = |options: &[String]| mount_arguments("nfs", options, "s:/p", Path::new("/t")).join(" ");
        assert_eq!(arguments(&options(&given, &[])), "-t nfs -o hard,noatime,ro s:/p /t");
        assert_eq!(arguments(&[]), "-t nfs s:/p /t");
    }
}
