//! What the end of a node needs of the engine, and of logind.

use std::{os::fd::OwnedFd, sync::Arc, time::Duration};

use async_trait::async_trait;

use super::classes::Given;
use berth_sys::logind::{Heard, Logind, LogindError, Session, Signals};
use berth_types::{Pod, PodUid};

/// The pods.
#[async_trait]
pub trait Pods: Send + Sync + 'static {
    /// Waits until all pods are known: an agent that has just started has yet to be told.
    async fn known(&self);
    /// Those of which something may run.
    fn active(&self) -> Vec<Arc<Pod>>;
    /// Ends a pod and waits until nothing of it runs and nothing is mounted.
    ///
    /// # Errors
    /// It does not end.
    async fn end(&self, pod: &Arc<Pod>, given: Given) -> Result<(), String>;
    /// Tells that a pod has not ended in its time.
    fn late(&self, pod: &Pod);
    /// Waits until what became of these pods is with the API server, where there is one.
    async fn told(&self, pods: &[PodUid]);
    /// Says whether the node goes down: admission and the node's status follow.
    fn set_shutting_down(&self, is: bool);
}

/// Who says that the machine goes down: logind.
#[async_trait]
pub trait LoginManager: Send + Sync + 'static {
    /// As [`Logind::connect`].
    ///
    /// # Errors
    /// There is no bus.
    async fn connect(&self) -> Result<(Box<dyn LoginSession>, Box<dyn LoginSignals>), LogindError>;
}

/// A connection to it. Each call has a limit of its own.
#[async_trait]
pub trait LoginSession: Send + Sync {
    /// As [`Session::longest_delay`].
    ///
    /// # Errors
    /// It does not say.
    async fn longest_delay(&self) -> Result<Duration, LogindError>;
    /// As [`Session::is_preparing`].
    ///
    /// # Errors
    /// It does not say.
    async fn is_preparing(&self) -> Result<bool, LogindError>;
    /// As [`Session::inhibit`].
    ///
    /// # Errors
    /// There is no lock.
    async fn inhibit(&self) -> Result<OwnedFd, LogindError>;
    /// As [`Session::reload`].
    ///
    /// # Errors
    /// systemd refuses.
    async fn reload(&self) -> Result<(), LogindError>;
}

/// What it says on that connection by itself.
#[async_trait]
pub trait LoginSignals: Send {
    /// As [`Signals::next`].
    ///
    /// # Errors
    /// The connection is lost.
    async fn next(&mut self) -> Result<Heard, LogindError>;
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
        self.longest_delay().await
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
    async fn next(&mut self) -> Result<Heard, LogindError> {
        self.next().await
    }
}
