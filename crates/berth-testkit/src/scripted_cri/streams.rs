//! Pending stream requests of the scripted CRI, by one-time path of its streaming server.

use std::collections::BTreeMap;

use berth_proto::cri;
use tonic::Code;

use super::state::Refusal;

/// CRI request that opened a stream.
#[derive(Debug, Clone, PartialEq)]
pub enum StreamRequest {
    /// Exec of a command.
    Exec(cri::ExecRequest),
    /// Attach to a container's own process.
    Attach(cri::AttachRequest),
    /// Port forwarding into a sandbox.
    PortForward(cri::PortForwardRequest),
}

impl StreamRequest {
    fn kind(&self) -> &'static str {
        match self {
            Self::Exec(_) => "exec",
            Self::Attach(_) => "attach",
            Self::PortForward(_) => "portforward",
        }
    }

    /// Rejects what every CRI streaming server rejects (spec 04b §5).
    pub(super) fn validate(&self) -> Result<(), Refusal> {
        let refuse = |text: &str| Err((Code::InvalidArgument, text.to_owned()));
        let (id, tty, stderr, any) = match self {
            Self::Exec(r) => (&r.container_id, r.tty, r.stderr, r.stdin || r.stdout || r.stderr),
            Self::Attach(r) => (&r.container_id, r.tty, r.stderr, r.stdin || r.stdout || r.stderr),
            Self::PortForward(r) => (&r.pod_sandbox_id, false, false, true),
        };
        if id.is_empty() {
            return refuse("missing required container_id");
        }
        if tty && stderr {
            return refuse("tty and stderr cannot both be true");
        }
        if !any {
            return refuse("one of stdin, stdout, or stderr must be set");
        }
        Ok(())
    }
}

/// Stream requests whose path has not been used yet.
#[derive(Debug, Default)]
pub(super) struct PendingStreams {
    pub(super) base: Option<String>,
    open: BTreeMap<String, StreamRequest>,
    next: u64,
}

impl PendingStreams {
    pub(super) fn add(&mut self, request: StreamRequest) -> Result<String, Refusal> {
        let Some(base) = &self.base else {
            return Err((Code::Unimplemented, format!("unknown method {} for service", request.kind())));
        };
        self.next += 1;
        let path = format!("/{}/token{:03}", request.kind(), self.next);
        let url = format!("{base}{path}");
        self.open.insert(path, request);
        Ok(url)
    }

    pub(super) fn take(&mut self, path: &str) -> Option<StreamRequest> {
        self.open.remove(path)
    }
}
