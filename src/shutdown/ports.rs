//! Interfaces of graceful node shutdown to the engine and to logind.

use std::{os::fd::OwnedFd, sync::Arc, time::Duration};

use async_trait::async_trait;

use super::classes::PodTimeLimits;
use berth_sys::logind::{Logind, LogindError, Session, ShutdownSignal, Signals};
use berth_types::{Pod, PodUid};

/// Pods of the engine.
#[async_trait]
pub trait Pods: Send + Sync + 'static {
    /// Waits until all pods are known: after a start the sources have yet to deliver them.
    async fn known(&self);
    /// Pods of which containers may run.
    fn active(&self) -> Vec<Arc<Pod>>;
    /// Terminates a pod and waits until none of its containers run and none of its volumes are mounted.
    ///
    /// # Errors
    /// The pod does not terminate.
    async fn end(&self, pod: &Arc<Pod>, given: PodTimeLimits) -> Result<(), String>;
    /// Reports that a pod has not terminated in time.
    fn report_late(&self, pod: &Pod);
    /// Waits until the final statuses of these pods are at the API server, if there is one.
    async fn wait_until_published(&self, pods: &[PodUid]);
    /// Sets whether the node is shutting down, for admission and the node status.
    fn set_shutting_down(&self, is: bool);
}

/// logind's login manager, which announces the machine's shutdown.
#[async_trait]
pub trait LoginManager: Send + Sync + 'static {
    /// As [`Logind::connect`].
    ///
    /// # Errors
    /// The bus is not available.
    async fn connect(&self) -> Result<(Box<dyn LoginSession>, Box<dyn LoginSignals>), LogindError>;
}

/// Connection to the login manager. Each call has its own timeout.
#[async_trait]
pub trait LoginSession: Send + Sync {
    /// As [`Session::max_inhibit_delay`].
    ///
    /// # Errors
    /// The call fails.
    async fn longest_delay(&self) -> Result<Duration, LogindError>;
    /// As [`Session::is_preparing`].
    ///
    /// # Errors
    /// The call fails.
    async fn is_preparing(&self) -> Result<bool, LogindError>;
    /// As [`Session::inhibit`].
    ///
    /// # Errors
    /// The lock is not granted.
    async fn inhibit(&self) -> Result<OwnedFd, LogindError>;
    /// As [`Session::reload`].
    ///
    /// # Errors
    /// systemd refuses.
    async fn reload(&self) -> Result<(), LogindError>;
}

/// Signals of the login manager on that connection.
#[async_trait]
pub trait LoginSignals: Send {
    /// As [`Signals::next`].
    ///
    /// # Errors
    /// The connection is lost.
    async fn next(&mut self) -> Result<ShutdownSignal, LogindError>;
}

#[async_trait]
impl LoginManager for Logind {
    async fn connect(&self) -> Result<(Box<dyn LoginSession>, Box<dyn LoginSignals>), LogindError> {
        let (session, signals) = self.connect().await?;
        Ok((Box::new(session), Box::new(signals)))
    }
}

#[async_trait]
impl LoginSession for Session {
    async fn longest_delay(&self) -> Result<Duration, LogindError> {
        self.max_inhibit_delay().await
    }

    async fn is_preparing(&self) -> Result<bool, LogindError> {
        self.is_preparing().await
    }

    async fn inhibit(&self) -> Result<OwnedFd, LogindError> {
        self.inhibit().await
    }

    async fn reload(&self) -> Result<(), LogindError> {
        self.reload().await
    }
}

#[async_trait]
impl LoginSignals for Signals {
    async fn next(&mut self) -> Result<ShutdownSignal, LogindError> {
        self.next().await
    }
}
