//! One attempt of a probe, whatever its handler: gathers what the handler needs and bounds it. Behaviour: spec 05 §1.3,
//! §1.7.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use tokio::time::Instant;

use super::{
    dial::Dialler,
    exec, grpc, http,
    kind::{Kind, Pace},
    outcome::Outcome,
    target::{self, HttpAsk},
};
use crate::{
    cri::RuntimeService,
    pod::{ContainerId, Pod, api},
};

/// Attempts for one result: an error is tried again, at once.
const ATTEMPTS: u32 = 3;

/// What is to be asked.
#[derive(Clone, Debug)]
pub struct Ask {
    /// The pod.
    pub pod: Arc<Pod>,
    /// The container.
    pub container: Arc<str>,
    /// Which of its probes.
    pub kind: Kind,
    /// The container's instance.
    pub id: ContainerId,
    /// The pod's address, where it has one.
    pub ip: Option<String>,
}

/// Asks once. The real one is [`Handlers`].
#[async_trait]
pub trait Asker: Send + Sync + 'static {
    /// One attempt; ends soon after the probe's timeout.
    async fn ask(&self, ask: &Ask) -> Outcome;
}

/// Asks until there is a result, or until there have been enough errors.
///
/// Where we come to read an answer only so late that our own delay is longer than the timeout, a failure says more
/// about this node than about the container: that, too, is tried again.
pub async fn result(asker: &dyn Asker, ask: &Ask) -> Outcome {
    let mut left = ATTEMPTS;
    loop {
        let begun = Instant::now();
        let outcome = asker.ask(ask).await;
        left = left.saturating_sub(1);
        let is_doubtful = match &outcome {
            Outcome::Success | Outcome::Warning(_) => false,
            Outcome::Error { .. } => true,
            Outcome::Failure(_) => is_network(ask) && begun.elapsed() > timeout(ask) * 2,
        };
        if !is_doubtful || left == 0 {
            return outcome;
        }
    }
}

fn probe(ask: &Ask) -> Option<(&api::Container, &api::Probe)> {
    let (_, container) = ask.pod.container(&ask.container)?;
    Some((container, ask.kind.of(container)?))
}

/// Whether the deadline of an attempt is kept by us; that of a command is the runtime's.
fn is_network(ask: &Ask) -> bool {
    probe(ask).is_some_and(|(_, probe)| probe.exec.is_none())
}

fn timeout(ask: &Ask) -> Duration {
    probe(ask).map_or(Duration::MAX / 2, |(_, probe)| Pace::of(probe).timeout)
}

/// The four handlers.
pub struct Handlers {
    runtime: Arc<dyn RuntimeService>,
    dialler: Dialler,
}

impl Handlers {
    /// `runtime` runs commands.
    ///
    /// # Errors
    /// TLS cannot be set up.
    pub fn new(runtime: Arc<dyn RuntimeService>) -> Result<Self, String> {
        Ok(Self { runtime, dialler: Dialler::new()? })
    }

    async fn try_ask(&self, ask: &Ask) -> Result<Outcome, String> {
        let (container, probe) = probe(ask).ok_or("the pod has no such probe")?;
        let timeout = Pace::of(probe).timeout;
        let ip = ask.ip.as_deref();
        if let Some(action) = &probe.exec {
            let command = target::command(action, container).map_err(|e| e.to_string())?;
            return Ok(exec::probe(&*self.runtime, &ask.id, &command, timeout).await);
        }
        if let Some(action) = &probe.http_get {
            let first = match HttpAsk::new(action, container, ip) {
                Ok(first) => first,
                Err(outcome) => return Ok(outcome),
            };
            // What is large is not carried about by those who do not need it.
            return Ok(Box::pin(http::probe(&self.dialler, first, timeout)).await);
        }
        if let Some(action) = &probe.tcp_socket {
            let port = target::port(&action.port, container)?;
            let host = action.host.as_deref().filter(|h| !h.is_empty()).or(ip).ok_or(target::NO_ADDRESS)?;
            return Ok(match self.dialler.knock(host, port, Instant::now() + timeout).await {
                Ok(_) => Outcome::Success,
                Err(error) => error.outcome(),
            });
        }
        if let Some(action) = &probe.grpc {
            let port = target::port_number(i64::from(action.port))?;
            let service = action.service.as_deref().unwrap_or_default();
            let host = ip.ok_or(target::NO_ADDRESS)?;
            return Ok(Box::pin(grpc::probe(&self.dialler, host, port, service, timeout)).await);
        }
        Err("missing probe handler".to_owned())
    }
}

#[async_trait]
impl Asker for Handlers {
    async fn ask(&self, ask: &Ask) -> Outcome {
        self.try_ask(ask).await.unwrap_or_else(Outcome::unknown)
    }
}

#[cfg(test)]
mod tests;
