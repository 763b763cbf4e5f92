//! One probe attempt, for each handler: exec, httpGet, tcpSocket, grpc.
//!
//! Implements spec 05 §1.3, §1.7.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use tokio::time::Instant;

pub use super::request::ProbeRequest;
use super::{
    connector::Connector,
    exec, grpc, http,
    outcome::Outcome,
    request::{ProbeAction, ResolvedRequest},
};
use berth_cri::RuntimeService;

/// Maximum number of attempts per result: an error is retried immediately.
const ATTEMPTS: u32 = 3;

/// Makes attempts. The implementation of the product is [`Handlers`].
#[async_trait]
pub trait Prober: Send + Sync + 'static {
    /// Makes one attempt; returns soon after the probe's timeout.
    async fn probe_once(&self, ask: &ProbeRequest) -> Outcome;
}

/// Makes attempts until there is a result, or until the maximum number of attempts is reached.
///
/// If the agent processes the response so late that an attempt takes more than twice the timeout, a failure is more
/// likely caused by this node than by the container: it is retried as well.
pub async fn result(asker: &dyn Prober, ask: &ProbeRequest) -> Outcome {
    let mut left = ATTEMPTS;
    loop {
        let begun = Instant::now();
        let outcome = asker.probe_once(ask).await;
        left = left.saturating_sub(1);
        let is_doubtful = match &outcome {
            Outcome::Success | Outcome::Warning(_) => false,
            Outcome::Error { .. } => true,
            Outcome::Failure(_) => is_late(ask.resolved(), begun.elapsed()),
        };
        if !is_doubtful || left == 0 {
            return outcome;
        }
    }
}

/// Returns whether an attempt took so long that the agent itself is slow. The runtime enforces the deadline of a
/// command, so exec never counts as late.
fn is_late(made: &ResolvedRequest, took: Duration) -> bool {
    !matches!(made.what, ProbeAction::Command(_)) && took > made.timeout * 2
}

/// The four handlers.
pub struct Handlers {
    runtime: Arc<dyn RuntimeService>,
    dialler: Connector,
}

impl Handlers {
    /// Creates the handlers; `runtime` executes commands.
    ///
    /// # Errors
    /// TLS cannot be set up.
    pub fn new(runtime: Arc<dyn RuntimeService>) -> Result<Self, String> {
        Ok(Self { runtime, dialler: Connector::new()? })
    }
}

#[async_trait]
impl Prober for Handlers {
    async fn probe_once(&self, ask: &ProbeRequest) -> Outcome {
        let ResolvedRequest { timeout, what } = ask.resolved();
        let dialler = self.dialler.of(ask.pod.uid());
        match what {
            ProbeAction::Command(command) => exec::probe(&*self.runtime, &ask.id, command, *timeout).await,
            // Boxed: the other handlers do not have to carry its large future.
            ProbeAction::Http(ask) => Box::pin(http::probe(dialler, ask, *timeout)).await,
            ProbeAction::Tcp { host, port } => match dialler.connect(host, *port, Instant::now() + *timeout).await {
                Ok(_) => Outcome::Success,
                Err(error) => error.outcome(),
            },
            ProbeAction::Grpc { host, port, service } => {
                Box::pin(grpc::probe(dialler, host, *port, service, *timeout)).await
            }
            ProbeAction::Invalid(outcome) => outcome.clone(),
        }
    }
}

#[cfg(test)]
mod tests;
