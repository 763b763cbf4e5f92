//! One attempt of a probe, whatever its handler. Behaviour: spec 05 §1.3, §1.7.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use tokio::time::Instant;

pub use super::ask::Ask;
use super::{
    ask::{Made, What},
    dial::Dialler,
    exec, grpc, http,
    outcome::Outcome,
};
use berth_cri::RuntimeService;

/// Attempts for one result: an error is tried again, at once.
const ATTEMPTS: u32 = 3;

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
            Outcome::Failure(_) => is_late(ask.made(), begun.elapsed()),
        };
        if !is_doubtful || left == 0 {
            return outcome;
        }
    }
}

/// Whether an attempt took so long that it is us who are slow. The deadline of a command is the runtime's, and not ours.
fn is_late(made: &Made, took: Duration) -> bool {
    !matches!(made.what, What::Command(_)) && took > made.timeout * 2
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
}

#[async_trait]
impl Asker for Handlers {
    async fn ask(&self, ask: &Ask) -> Outcome {
        let Made { timeout, what } = ask.made();
        let dialler = self.dialler.of(ask.pod.uid());
        match what {
            What::Command(command) => exec::probe(&*self.runtime, &ask.id, command, *timeout).await,
            // What is large is not carried about by those who do not need it.
            What::Answer(ask) => Box::pin(http::probe(dialler, ask, *timeout)).await,
            What::Port { host, port } => match dialler.connect(host, *port, Instant::now() + *timeout).await {
                Ok(_) => Outcome::Success,
                Err(error) => error.outcome(),
            },
            What::Health { host, port, service } => {
                Box::pin(grpc::probe(dialler, host, *port, service, *timeout)).await
            }
            What::Nobody(outcome) => outcome.clone(),
        }
    }
}

#[cfg(test)]
mod tests;
