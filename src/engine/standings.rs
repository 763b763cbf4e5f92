//! Where each pod stands, as `why` asks it: a snapshot the sync loop publishes, with the stages its workers keep up to
//! date. Whoever reads it waits for nobody.

use std::sync::Arc;

use tokio::sync::watch;

use super::{lifecycle::Lifecycle, ports::Stage};
use crate::pod::PodRef;

/// Where a pod stands.
#[derive(Clone, Debug)]
pub struct Standing {
    /// Which pod.
    pub id: PodRef,
    /// Where it is in its life.
    pub life: Lifecycle,
    /// What its worker waits for; `None` where it stands in line or is finished.
    pub stage: Option<Stage>,
}

/// The latest standings, in no order.
pub type Standings = watch::Receiver<Arc<Vec<Standing>>>;
