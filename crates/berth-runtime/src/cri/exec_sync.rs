//! `ExecSync` of CRI: runs a program in a container, returns its output.
//!
//! Implements spec 09a §4, §11 (AC-09a-X7, X8).

use std::{
    fs::File,
    os::fd::OwnedFd,
    path::Path,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use rustix::pipe::{PipeFlags, pipe_with};
use tokio::{
    io::AsyncReadExt,
    net::unix::pipe,
    sync::watch,
    time::{Instant, timeout, timeout_at},
};

use crate::{
    actor::{SHIM_ANSWER, SandboxHandle},
    errors::{RuntimeError, RuntimeResult, outcome},
    ids,
    runtime::Runtime,
    streams,
};
use berth_proto::cri;
use berth_shim::plan::{Exit, ProcessTarget, Reply, Scope, ShimRequest};

/// Maximum bytes kept of each stream.
const MOST: usize = 16 << 20;
/// Maximum bytes kept at once for all callers that want more than [`SMALL`] of each stream.
const BUDGET: usize = 64 << 20;
/// First bytes of each stream, exempt from [`BUDGET`]: probes and hooks need no more, and hundreds may run at once.
const SMALL: usize = 10 << 10;
/// Maximum bytes of both streams in a response over a socket, where messages are limited to 16 MiB.
const MOST_OF_BOTH: usize = (16 << 20) - (100 << 10);
/// How long a killed process may take to exit.
const KILL_LIMIT: Duration = Duration::from_secs(10);
/// `SIGKILL`.
const KILL: i32 = 9;

/// Runs a program in a running container. Keeps at most `most` bytes of each stream, 16 MiB by default.
///
/// # Errors
/// The container does not run, the program cannot be executed, or it exceeds its timeout.
pub async fn exec_sync(
    runtime: &Arc<Runtime>,
    request: cri::ExecSyncRequest,
    most: Option<usize>,
) -> RuntimeResult<cri::ExecSyncResponse> {
    let most = most.unwrap_or(MOST).min(MOST);
    let (pod, container) = runtime.container(&request.container_id)?;
    if request.cmd.is_empty() {
        return Err(RuntimeError::invalid("command must not be empty"));
    }
    pod.now().container(&container)?.running()?;
    streams::check_exec_limit(&pod, &container)?;
    let running = runtime.clone();
    let executed = runtime.detached(async move { run(&running, &pod, &container, &request, most).await }).await;
    runtime.shell.metrics.executed(outcome(&executed));
    executed.map_err(|error| error.during("failed to exec in container"))
}

async fn run(
    runtime: &Arc<Runtime>,
    pod: &SandboxHandle,
    container: &str,
    request: &cri::ExecSyncRequest,
    most: usize,
) -> RuntimeResult<cri::ExecSyncResponse> {
    let exec = ids::new_id();
    let sandbox = pod.now();
    let planner = &runtime.ports.planner;
    let mut plan = planner.exec(&sandbox.container(container)?.plan, &exec, &request.cmd, false)?;
    plan.keeps_orphans = request.timeout > 0; // otherwise a program that times out could leave processes behind
    let target = ProcessTarget::Exec(container.to_owned(), exec.clone());
    let exit = pod.await_exit(target.clone());
    let (files, out, err) = streams()?;
    let begun = Instant::now();
    let (reply, _) = pod
        .shim()?
        .request(ShimRequest::Exec(Box::new(plan)), files, SHIM_ANSWER)
        .await
        .map_err(|error| error.during(&format!("failed to start exec \"{exec}\"")))?;
    if !matches!(reply, Reply::Started(_)) {
        return Err(RuntimeError::other("unexpected response from shim: expected a process"));
    }
    let (out, err) = (collect(runtime, out, most), collect(runtime, err, most));
    let lost = || RuntimeError::other("shim of the container exited");
    let exit = match u64::try_from(request.timeout).unwrap_or_default() {
        0 => exit.await.map_err(|_| lost())?,
        seconds => {
            let mut exit = exit;
            match timeout_at(begun + Duration::from_secs(seconds), &mut exit).await {
                Ok(exit) => exit.map_err(|_| lost())?,
                Err(_) => return Err(kill_timed_out(pod, target, exit, seconds).await),
            }
        }
    };
    // Processes that the program left behind may keep the streams open forever.
    let until = Instant::now() + runtime.shell.config.exec_io_drain;
    let (stdout, stderr) = (out.wait_until(until).await, err.wait_until(until).await);
    Ok(answer(exit, stdout, stderr))
}

fn answer(exit: Exit, stdout: Vec<u8>, mut stderr: Vec<u8>) -> cri::ExecSyncResponse {
    let mut stdout = stdout;
    stdout.truncate(MOST_OF_BOTH);
    stderr.truncate(MOST_OF_BOTH.saturating_sub(stdout.len()));
    cri::ExecSyncResponse { stdout, stderr, exit_code: exit.code }
}

/// Kills the program that timed out, its process group, and its remaining descendants.
async fn kill_timed_out(
    pod: &SandboxHandle,
    target: ProcessTarget,
    exit: tokio::sync::oneshot::Receiver<Exit>,
    seconds: u64,
) -> RuntimeError {
    if let Ok(shim) = pod.shim() {
        let kill = ShimRequest::Signal { to: target, signal: KILL, scope: Scope::Group };
        // The program may have exited in the meantime.
        let _ = shim.request(kill, Vec::new(), SHIM_ANSWER).await;
    }
    // Only the kernel can delay a process after SIGKILL; do not wait longer than this.
    let _ = timeout(KILL_LIMIT, exit).await;
    RuntimeError::deadline(format!("timeout {seconds}s exceeded: context deadline exceeded"))
}

type Streams = (Vec<OwnedFd>, pipe::Receiver, pipe::Receiver);

/// The program's descriptors, and the read ends of its output.
fn streams() -> RuntimeResult<Streams> {
    let failed = |error: std::io::Error| RuntimeError::other(format!("create pipe: {error}"));
    let null = File::open(Path::new("/dev/null")).map_err(failed)?;
    let (out, out_end) = pipe_with(PipeFlags::CLOEXEC).map_err(|e| failed(e.into()))?;
    let (err, err_end) = pipe_with(PipeFlags::CLOEXEC).map_err(|e| failed(e.into()))?;
    let receive = |end: OwnedFd| {
        rustix::io::ioctl_fionbio(&end, true)?;
        pipe::Receiver::from_owned_fd(end)
    };
    let (out, err) = (receive(out).map_err(failed)?, receive(err).map_err(failed)?);
    Ok((vec![null.into(), out_end, err_end], out, err))
}

/// Bytes kept now and counted against [`BUDGET`].
static BUFFERED: AtomicUsize = AtomicUsize::new(0);

/// First bytes of a stream.
#[derive(Default)]
struct OutputBuffer {
    bytes: Vec<u8>,
    /// How many of the bytes count against the budget.
    counted: usize,
    /// Whether a chunk was dropped: later chunks are dropped as well.
    is_cut: bool,
}

impl OutputBuffer {
    /// Appends a chunk; drops it and all later ones if the budget is exhausted.
    fn add(&mut self, piece: &[u8], buffered: &AtomicUsize) {
        if self.is_cut {
            return;
        }
        let counted = (self.bytes.len() + piece.len()).saturating_sub(SMALL) - self.counted;
        if buffered.fetch_add(counted, Ordering::Relaxed) + counted > BUDGET && counted > 0 {
            buffered.fetch_sub(counted, Ordering::Relaxed);
            self.is_cut = true;
            let rest = SMALL.saturating_sub(self.bytes.len());
            self.bytes.extend_from_slice(piece.get(..rest).unwrap_or_default());
            return;
        }
        self.counted += counted;
        self.bytes.extend_from_slice(piece);
    }

    /// Returns the bytes and releases their share of the budget.
    fn take(&mut self) -> Vec<u8> {
        BUFFERED.fetch_sub(std::mem::take(&mut self.counted), Ordering::Relaxed);
        std::mem::take(&mut self.bytes)
    }
}

impl Drop for OutputBuffer {
    fn drop(&mut self) {
        self.take();
    }
}

/// Output of a stream so far. Reading continues when this is dropped, so that the writer never gets SIGPIPE.
struct OutputCollector {
    bytes: Arc<Mutex<OutputBuffer>>,
    at_end: watch::Receiver<bool>,
}

fn collect(runtime: &Runtime, mut from: pipe::Receiver, most: usize) -> OutputCollector {
    let (ended, at_end) = watch::channel(false);
    let bytes = Arc::new(Mutex::new(OutputBuffer::default()));
    let collected = OutputCollector { bytes: bytes.clone(), at_end };
    runtime.shell.spawn(async move {
        let mut piece = vec![0; 16 << 10];
        while let Ok(count @ 1..) = from.read(&mut piece).await {
            let mut kept = bytes.lock().unwrap_or_else(PoisonError::into_inner);
            // Once nobody reads the result, the output is drained and dropped.
            let room = if ended.is_closed() { 0 } else { most.saturating_sub(kept.bytes.len()) };
            kept.add(piece.get(..count.min(room)).unwrap_or_default(), &BUFFERED);
        }
        ended.send_replace(true);
    });
    collected
}

impl OutputCollector {
    /// The bytes read up to the end of the stream or the deadline.
    async fn wait_until(mut self, until: Instant) -> Vec<u8> {
        // End of stream or deadline: either way this is all the output.
        let _ = timeout_at(until, self.at_end.wait_for(|ended| *ended)).await;
        self.bytes.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

impl Drop for OutputCollector {
    /// A killed program may leave processes that keep the stream open: their output is dropped.
    fn drop(&mut self) {
        self.bytes.lock().unwrap_or_else(PoisonError::into_inner).take();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_callers_share_a_budget_but_for_the_small_ones() {
        let buffered = AtomicUsize::new(0);
        let fill = |bytes: usize| {
            // The test's own counter keeps these bytes: they are never released.
            let mut kept = std::mem::ManuallyDrop::new(OutputBuffer::default());
            for _ in 0..bytes / 1024 {
                kept.add(&[0; 1024], &buffered);
            }
            kept.bytes.len()
        };
        assert_eq!([fill(SMALL), buffered.load(Ordering::Relaxed)], [SMALL, 0], "probes and hooks are not counted");
        for _ in 0..4 {
            assert_eq!(fill(MOST), MOST);
        }
        assert_eq!(fill(MOST), 5 * SMALL, "the rest of the budget, and what is never counted");
        assert_eq!(fill(MOST), SMALL);
        assert_eq!(buffered.load(Ordering::Relaxed), BUDGET);
        let mut cut = std::mem::ManuallyDrop::new(OutputBuffer::default());
        cut.add(&[1; SMALL + 100], &buffered);
        buffered.store(0, Ordering::Relaxed);
        cut.add(&[2], &buffered);
        assert_eq!(cut.bytes, [1; SMALL], "nothing is kept behind a gap");
    }

    #[test]
    fn an_answer_fits_into_a_message() {
        // AC-09a-X8
        let exit = Exit { code: 3, is_signal: false, at_ns: 1, is_oom: false, oom_kills: 0, lost_lines: 0 };
        let all = answer(exit, vec![0; MOST], vec![1; MOST]);
        assert_eq!((all.stdout.len(), all.stderr.len(), all.exit_code), (MOST_OF_BOTH, 0, 3));
        let all = answer(exit, vec![0; 10], vec![1; MOST]);
        assert_eq!((all.stdout.len(), all.stderr.len()), (10, MOST_OF_BOTH - 10));
    }
}
