//! Shims as child processes of this host.

use std::{
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use async_trait::async_trait;
use tokio::{
    task::spawn_blocking,
    time::{sleep, timeout},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use crate::{
    errors::{ErrorKind, RuntimeError, RuntimeResult},
    ports::{Shim, ShimSession, Shims},
    shim::{
        client::{self, ShimError},
        launcher,
    },
    store::Layout,
};
use berth_shim::{
    exit_record::ExitRecord,
    plan::{Exit, FailureKind, Hello, Reply, ShimRequest},
};

/// How long to retry the connection to a started shim.
const CONNECT: Duration = Duration::from_secs(5);
/// Number of attempts to remove an earlier shim binary after a shim has ended.
const ATTEMPTS: u32 = 10;
/// Delay between these attempts, while the shim and its pod's process 1 exit.
const PAUSE: Duration = Duration::from_millis(100);

/// The `Shims` port: starts shims and connects to running ones.
#[derive(Debug)]
pub struct ShimProcesses {
    program: PathBuf,
    layout: Layout,
    tasks: TaskTracker,
    stop: CancellationToken,
}

impl ShimProcesses {
    /// Unpacks the shim binary. Blocking.
    ///
    /// # Errors
    /// The binary is missing or cannot be unpacked.
    pub fn unpack(layout: Layout, (tasks, stop): (TaskTracker, CancellationToken)) -> RuntimeResult<Self> {
        let (program, protection) =
            launcher::unpack(&layout.state).map_err(|error| RuntimeError::other(error.to_string()))?;
        tracing::debug!(path = %program.display(), protection = ?protection, "Using shim executable");
        launcher::remove_others(&layout.state, &program);
        Ok(Self { program, layout, tasks, stop })
    }

    /// Path of the shim binary.
    pub fn program(&self) -> &Path {
        &self.program
    }

    async fn connect(&self, folder: &Path) -> RuntimeResult<(ShimSession, Hello)> {
        let (shim, events, connection) = client::connect(folder, CONNECT).await.map_err(runtime_error)?;
        let (stop, state, program) = (self.stop.clone(), self.layout.state.clone(), self.program.clone());
        let running = async move {
            let cause = connection.run().await;
            tracing::debug!(err = %cause, "Connection to shim closed");
            remove_former(state, program).await;
        };
        self.tasks.spawn(async move {
            tokio::select! {
                () = running => {}
                () = stop.cancelled() => {}
            }
        });
        let (hello, _) = shim.hello().await.map_err(runtime_error)?;
        Ok((ShimSession { shim: Arc::new(SocketShim(shim)), events: events.into() }, hello))
    }
}

/// Removes earlier shim binaries after a shim has ended: it may have been the last one that used them. Spec 09 §8.
async fn remove_former(state: PathBuf, program: PathBuf) {
    for _ in 0..ATTEMPTS {
        let (state, program) = (state.clone(), program.clone());
        let left = spawn_blocking(move || launcher::remove_others(&state, &program)).await;
        if left.is_ok_and(|left| left == 0) {
            return;
        }
        sleep(PAUSE).await;
    }
}

#[async_trait]
impl Shims for ShimProcesses {
    async fn spawn(&self, sandbox: &str, _: &[PathBuf]) -> RuntimeResult<ShimSession> {
        let (program, folder) = (self.program.clone(), self.layout.shim(sandbox));
        let at = folder.clone();
        let started = spawn_blocking(move || launcher::start(&program, &at)).await;
        let started = started.map_err(|error| RuntimeError::other(error.to_string()))?;
        started.map_err(|error| RuntimeError::other(format!("start shim: {error}")))?;
        self.connect(&folder).await.map(|(connected, _)| connected)
    }

    async fn find(&self, sandbox: &str) -> RuntimeResult<(ShimSession, Hello)> {
        self.connect(&self.layout.shim(sandbox)).await
    }

    fn exit_record(&self, folder: &Path, container: &str) -> Option<Exit> {
        // An unreadable record counts as absent: the exit is then unknown.
        ExitRecord::read(folder, container).ok().flatten().map(|record| record.exit)
    }
}

/// A shim that is reachable over its socket.
struct SocketShim(client::Shim);

#[async_trait]
impl Shim for SocketShim {
    async fn request(
        &self,
        request: ShimRequest,
        files: Vec<OwnedFd>,
        limit: Duration,
    ) -> RuntimeResult<(Reply, Vec<OwnedFd>)> {
        match timeout(limit, self.asked(request, &files)).await {
            Ok(answer) => answer.map_err(runtime_error),
            Err(_) => Err(RuntimeError::deadline(format!("shim did not respond within {limit:?}"))),
        }
    }
}

impl SocketShim {
    async fn asked(&self, request: ShimRequest, files: &[OwnedFd]) -> Result<(Reply, Vec<OwnedFd>), ShimError> {
        let shim = &self.0;
        let done = match request {
            ShimRequest::Hello => return shim.hello().await.map(|(hello, _)| (Reply::Hello(hello), Vec::new())),
            ShimRequest::MakeNamespaces(plan) => {
                let made = shim.make_namespaces(plan).await?;
                let (kinds, files) = made.descriptors.into_iter().unzip();
                return Ok((Reply::Namespaces { made: kinds, init: made.init }, files));
            }
            ShimRequest::Launch(plan) => return shim.launch(*plan).await.map(|s| (Reply::Started(s), Vec::new())),
            ShimRequest::Exec(plan) => {
                let stdio = match files {
                    [stdin, out, err] => Some([stdin.as_fd(), out.as_fd(), err.as_fd()]),
                    _ => None,
                };
                let (started, master) = shim.exec(*plan, stdio).await?;
                return Ok((Reply::Started(started), master.into_iter().collect()));
            }
            ShimRequest::Signal { to, signal, scope } => shim.signal(to, signal, scope).await,
            ShimRequest::Resize { of, columns, rows } => shim.resize(of, columns, rows).await,
            ShimRequest::CloseStdin(container) => shim.close_stdin(&container).await,
            ShimRequest::ReopenLog(container) => shim.reopen_log(&container).await,
            ShimRequest::Attach { container, stdin } => {
                let mut files = files.iter().map(AsFd::as_fd);
                let input = if stdin { files.next() } else { None };
                let Some(out) = files.next() else { return Err(ShimError::UnexpectedReply { what: "Attach" }) };
                shim.attach(&container, input, out, files.next()).await
            }
            ShimRequest::Acknowledge(number) => shim.acknowledge(number).await,
            ShimRequest::Forget(container) => shim.forget(&container).await,
            ShimRequest::Shutdown => shim.shutdown().await,
        };
        done.map(|()| (Reply::Done, Vec::new()))
    }
}

fn runtime_error(error: ShimError) -> RuntimeError {
    let kind = match &error {
        ShimError::Refused(failure) => match failure.kind {
            FailureKind::Unknown => ErrorKind::NotFound,
            FailureKind::State => ErrorKind::State,
            FailureKind::Deadline => ErrorKind::Deadline,
            FailureKind::Program | FailureKind::Other => ErrorKind::Other,
        },
        ShimError::TimedOut { .. } => ErrorKind::Deadline,
        _ => ErrorKind::Other,
    };
    RuntimeError::new(kind, error.to_string())
}
