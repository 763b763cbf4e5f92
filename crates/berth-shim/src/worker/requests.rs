//! Request handlers of the shim: each request gets its reply immediately or later.

use std::{io, os::fd::OwnedFd, time::Instant};

use rustix::{
    process::{Pid, Signal, kill_process_group},
    termios::{Winsize, tcsetwinsize},
};

use super::{
    super::{
        plan::{FailureKind, Hello, NamespacePlan, ProcessTarget, Reply, Scope, ShimFailure, ShimRequest, VERSION},
        socket::ReceiveResult,
        wire::{Datagram, DatagramKind},
    },
    RequestOrigin, Worker, cgroup_signals,
    client::AttachedClient,
    container::ShimContainer,
    descendants,
    launcher::{CreatedNamespaces, Stdio},
    shim_log,
    starts::{Start, failure, kill},
};
use berth_sys::failpoint;

/// Maximum number of events in the reply to `Hello`; the others follow as events.
const MOST_GREETED: usize = 1000;

/// A reply with its descriptors; `None` if it follows later.
type Answer = Result<Option<(Reply, Vec<OwnedFd>)>, ShimFailure>;

/// Reply without a result.
const DONE: Answer = Ok(Some((Reply::Done, Vec::new())));

impl Worker<'_> {
    /// Receives and handles one datagram from the agent.
    pub(super) fn receive_request(&mut self, now: Instant) {
        let Some(connection) = &self.connection else { return };
        let origin = |sequence| RequestOrigin { connection: connection.number, sequence };
        match connection.receive() {
            Ok(ReceiveResult::Nothing) => {}
            Ok(ReceiveResult::End) => self.close_connection(now),
            Ok(ReceiveResult::Datagram(bytes, fds)) => match Datagram::read(&bytes) {
                Ok(datagram) if datagram.kind == DatagramKind::Request => {
                    let origin = origin(datagram.sequence);
                    let answer = match datagram.body::<ShimRequest>() {
                        Ok(request) => self.answer(request, fds, origin, now),
                        Err(e) => Err(failure(FailureKind::Other, e.to_string())),
                    };
                    let answer = answer.unwrap_or_else(|reason| Some((Reply::Failed(reason), Vec::new())));
                    if let Some((reply, fds)) = answer {
                        self.reply(origin, &reply, fds);
                    }
                }
                Ok(_) => self.refuse(now, "unexpected response or event from the daemon"),
                Err(e) => self.refuse(now, &e.to_string()),
            },
            Err(e) => self.refuse(now, &e.to_string()),
        }
    }

    fn refuse(&mut self, now: Instant, why: &str) {
        shim_log::log(&format!("connection closed: {why}"));
        self.close_connection(now);
    }

    /// Drops the daemon's connection, if there is one, and records the time for the idle exit.
    pub(super) fn close_connection(&mut self, now: Instant) {
        if self.connection.take().is_some() {
            self.disconnected_since = Some(now);
        }
    }

    /// Queues a reply, if the connection of the request is still open.
    pub(super) fn reply(&mut self, origin: RequestOrigin, reply: &Reply, fds: Vec<OwnedFd>) {
        if let Some(connection) = self.connection.as_mut().filter(|c| c.number == origin.connection) {
            connection.reply(origin.sequence, reply, fds);
        }
    }

    fn answer(&mut self, request: ShimRequest, fds: Vec<OwnedFd>, origin: RequestOrigin, now: Instant) -> Answer {
        match request {
            ShimRequest::Hello => self.hello(),
            ShimRequest::MakeNamespaces(plan) => self.make_namespaces(&plan),
            ShimRequest::Launch(plan) => self.begin_launch(&plan, origin, now).map(|()| None),
            ShimRequest::Exec(plan) => {
                let stdio = exec_stdio(plan.process.terminal.is_some(), fds)?;
                self.begin_exec(&plan, stdio, origin, now).map(|()| None)
            }
            ShimRequest::Signal { to, signal, scope } => self.signal(&to, signal, scope),
            ShimRequest::Resize { of, columns, rows } => self.resize(&of, columns, rows),
            ShimRequest::CloseStdin(container) => {
                self.container_mut(&container)?.ends.input.close();
                DONE
            }
            ShimRequest::ReopenLog(container) => {
                let container = self.running(&container)?;
                container.log.reopen().map_err(|e| failure(FailureKind::Other, e.to_string()))?;
                DONE
            }
            ShimRequest::Attach { container, stdin } => self.attach(&container, stdin, fds),
            ShimRequest::Acknowledge(number) => {
                self.events.acknowledge(number);
                DONE
            }
            ShimRequest::Forget(container) => self.forget(&container),
            ShimRequest::Shutdown => self.shutdown(now),
        }
    }

    fn hello(&mut self) -> Answer {
        if let Some(connection) = &mut self.connection {
            connection.is_greeted = true;
        }
        let hello = Hello {
            version: VERSION,
            pid: std::process::id(),
            namespaces: self.pod.namespaces.iter().map(|(kind, _)| *kind).collect(),
            init: self.pod.init,
            containers: self.containers.values().map(ShimContainer::record).collect(),
            starting: self.starts.values().filter_map(Start::container).map(str::to_owned).collect(),
            events: self.events.greeting(MOST_GREETED),
        };
        Ok(Some((Reply::Hello(hello), self.namespace_copies()?)))
    }

    fn namespace_copies(&self) -> Result<Vec<OwnedFd>, ShimFailure> {
        let copies: io::Result<Vec<OwnedFd>> = self.pod.namespaces.iter().map(|(_, fd)| fd.try_clone()).collect();
        copies.map_err(|e| failure(FailureKind::Other, format!("duplicate namespace descriptor: {e}")))
    }

    fn make_namespaces(&mut self, plan: &NamespacePlan) -> Answer {
        if self.pod.is_made {
            return Err(failure(FailureKind::State, "namespaces already exist"));
        }
        cgroup_signals::enter(&plan.groups).map_err(|e| failure(FailureKind::Other, e.to_string()))?;
        failpoint::reached("shim.grouped");
        let CreatedNamespaces { mut namespaces, init } = self.launcher.make_namespaces(plan)?;
        failpoint::reached("shim.namespaces");
        namespaces.sort_by_key(|(kind, _)| *kind);
        self.pod = super::Pod { is_made: true, namespaces, init, users: plan.users };
        let made = self.pod.namespaces.iter().map(|(kind, _)| *kind).collect();
        Ok(Some((Reply::Namespaces { made, init }, self.namespace_copies()?)))
    }

    fn signal(&mut self, to: &ProcessTarget, number: i32, scope: Scope) -> Answer {
        let signal = berth_sys::signal::by_number(number);
        let signal = signal.ok_or_else(|| failure(FailureKind::Other, format!("invalid signal {number}")))?;
        let mut frozen = Vec::new();
        let pid = match to {
            ProcessTarget::Init => {
                self.pod.init.ok_or_else(|| failure(FailureKind::Unknown, "pod has no init process"))?
            }
            ProcessTarget::Container(id) if signal == Signal::KILL && self.kill_start(id) => return DONE,
            ProcessTarget::Container(id) if scope == Scope::ControlGroup => {
                let container = self.container_mut(id)?;
                container.is_killed |= signal == Signal::KILL && container.is_running();
                if signal == Signal::KILL {
                    cgroup_signals::kill(&container.groups);
                } else {
                    cgroup_signals::signal(&container.groups, signal);
                }
                return DONE;
            }
            ProcessTarget::Container(id) => {
                let container = self.running(id)?;
                if signal == Signal::KILL {
                    container.is_killed = true;
                    frozen.clone_from(&container.groups);
                }
                container.started.pid
            }
            ProcessTarget::Exec(id, exec) => {
                let pid = self.container_mut(id)?.execs.get(exec).copied();
                pid.ok_or_else(|| failure(FailureKind::Unknown, format!("process {exec:?} not found")))?
            }
        };
        if scope == Scope::Group && signal == Signal::KILL {
            descendants::kill(pid); // descendants with a process group of their own
        }
        if scope != Scope::Process {
            // The process was not reaped yet, so its process group id is still its own.
            let group = i32::try_from(pid).ok().and_then(Pid::from_raw);
            let _empty = group.map(|group| kill_process_group(group, signal));
        }
        kill(pid, signal);
        cgroup_signals::thaw(&frozen); // a frozen process exits only when thawed
        failpoint::reached("shim.signalled");
        DONE
    }

    fn resize(&mut self, of: &ProcessTarget, columns: u16, rows: u16) -> Answer {
        let ProcessTarget::Container(id) = of else {
            return Err(failure(FailureKind::State, "terminal is owned by the daemon"));
        };
        if let Some(terminal) = &self.container_mut(id)?.terminal {
            let size = Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
            tcsetwinsize(terminal, size).map_err(|e| failure(FailureKind::Other, format!("resize terminal: {e}")))?;
        }
        DONE
    }

    fn attach(&mut self, id: &str, stdin: bool, fds: Vec<OwnedFd>) -> Answer {
        let container = self.running(id)?;
        let mut fds = fds.into_iter();
        let input = if stdin { fds.next() } else { None };
        let Some(stdout) = fds.next() else {
            return Err(failure(FailureKind::Other, "attach: stdout is missing"));
        };
        let input = input.filter(|_| container.ends.input.is_open());
        if container.attach(AttachedClient::new(input, stdout, fds.next())) {
            DONE
        } else {
            Err(failure(FailureKind::State, format!("container {id:?} has too many attached clients")))
        }
    }

    fn forget(&mut self, id: &str) -> Answer {
        let (key, container) = self.container(id).ok_or_else(|| unknown(id))?;
        if !container.is_over() || !container.execs.is_empty() {
            return Err(failure(FailureKind::State, format!("container {id:?} has not exited")));
        }
        self.kills_before += container.kills();
        self.containers.remove(&key);
        failpoint::reached("shim.forgotten");
        DONE
    }

    fn shutdown(&mut self, now: Instant) -> Answer {
        if !self.is_empty() {
            return Err(failure(FailureKind::State, "containers are still running"));
        }
        self.leaving = Some(now);
        failpoint::reached("shim.leaving");
        DONE
    }

    /// Whether no container runs and none is being started.
    pub(super) fn is_empty(&self) -> bool {
        self.starts.is_empty() && self.containers.values().all(ShimContainer::is_over)
    }

    /// Container by id, with its key.
    pub(super) fn container(&self, id: &str) -> Option<(u32, &ShimContainer)> {
        self.containers.iter().find(|(_, container)| container.id == id).map(|(key, container)| (*key, container))
    }

    fn container_mut(&mut self, id: &str) -> Result<&mut ShimContainer, ShimFailure> {
        self.containers.values_mut().find(|container| container.id == id).ok_or_else(|| unknown(id))
    }

    fn running(&mut self, id: &str) -> Result<&mut ShimContainer, ShimFailure> {
        let container = self.container_mut(id)?;
        if container.is_running() {
            Ok(container)
        } else {
            Err(failure(FailureKind::State, format!("container {id:?} has exited")))
        }
    }
}

fn unknown(id: &str) -> ShimFailure {
    failure(FailureKind::Unknown, format!("container {id:?} not found"))
}

fn exec_stdio(has_terminal: bool, fds: Vec<OwnedFd>) -> Result<Stdio, ShimFailure> {
    if has_terminal {
        return Ok(Stdio::Terminal);
    }
    let count = fds.len();
    let fds = <[OwnedFd; 3]>::try_from(fds);
    fds.map(Stdio::Files)
        .map_err(|_| failure(FailureKind::Other, format!("exec: expected 3 descriptors, found {count}")))
}
