//! gRPC client of one CSI driver: timeouts, metrics, and error classification.
//!
//! Implements spec 07 §2.4, §12.3.

use std::{path::PathBuf, time::Duration};

use tokio::time::{Instant, timeout_at};
use tonic::{Code, Request, Response, Status, transport::Channel};

use crate::{
    attachable::{ErrorCause, OpError},
    spec::VolumeSpec,
};
use berth_cri::CriError;
use berth_metrics::{CsiMetrics, OperationTarget};
use berth_proto::csi::{
    self, node_client::NodeClient, node_service_capability, node_service_capability::rpc::Type as Capability,
};

/// Timeout of all calls of one operation.
pub const LIMIT: Duration = Duration::from_secs(120);
/// Maximum response size in bytes.
const MESSAGE: usize = 4 << 20;

/// gRPC error of a call to a CSI driver, also for local timeouts.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{text}")]
pub struct CallError {
    /// gRPC code from the driver, or the one assigned to a local failure.
    pub code: Code,
    /// Message `rpc error: code = … desc = …`.
    text: String,
}

impl From<Status> for CallError {
    fn from(status: Status) -> Self {
        let error = CriError::from(status);
        let code = match &error {
            CriError::Rpc { code, .. } => *code,
            _ => Code::Unknown,
        };
        Self { code, text: error.to_string() }
    }
}

impl CallError {
    fn late() -> Self {
        let text = "rpc error: code = DeadlineExceeded desc = context deadline exceeded".to_owned();
        Self { code: Code::DeadlineExceeded, text }
    }

    /// Whether the driver has finished the call: it did not take effect and will not.
    pub fn is_final(&self) -> bool {
        !matches!(
            self.code,
            Code::Cancelled | Code::DeadlineExceeded | Code::Unavailable | Code::ResourceExhausted | Code::Aborted
        )
    }

    /// Converts the error to that of a volume operation with message `text`.
    pub fn about(&self, text: impl Into<String>) -> OpError {
        let error = if self.is_final() { OpError::failed(text) } else { OpError::uncertain(text) };
        error.with_cause(match self.code {
            Code::FailedPrecondition => ErrorCause::InUse,
            Code::InvalidArgument | Code::OutOfRange | Code::NotFound => ErrorCause::Infeasible,
            _ => ErrorCause::Other,
        })
    }
}

/// Capabilities of a driver's node service.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Capabilities {
    /// `STAGE_UNSTAGE_VOLUME`.
    pub stages: bool,
    /// `GET_VOLUME_STATS`.
    pub reports_stats: bool,
    /// `EXPAND_VOLUME`.
    pub expands: bool,
    /// `SINGLE_NODE_MULTI_WRITER`: distinguishes single and multiple writers on one node.
    pub knows_single_writers: bool,
    /// `VOLUME_MOUNT_GROUP`: the driver applies `fsGroup` itself.
    pub sets_group: bool,
    /// `VOLUME_CONDITION`: reports abnormal volumes.
    pub reports_condition: bool,
}

impl Capabilities {
    fn of(answer: &csi::NodeGetCapabilitiesResponse) -> Self {
        let mut found = Self::default();
        for capability in &answer.capabilities {
            let Some(node_service_capability::Type::Rpc(rpc)) = &capability.r#type else { continue };
            match Capability::try_from(rpc.r#type) {
                Ok(Capability::StageUnstageVolume) => found.stages = true,
                Ok(Capability::GetVolumeStats) => found.reports_stats = true,
                Ok(Capability::ExpandVolume) => found.expands = true,
                Ok(Capability::SingleNodeMultiWriter) => found.knows_single_writers = true,
                Ok(Capability::VolumeMountGroup) => found.sets_group = true,
                Ok(Capability::VolumeCondition) => found.reports_condition = true,
                // Capabilities of newer drivers are ignored.
                Ok(Capability::Unknown) | Err(_) => {}
            }
        }
        found
    }
}

/// Client of a driver's node service.
#[derive(Clone, Debug)]
pub struct DriverClient {
    driver: String,
    channel: Channel,
    metrics: CsiMetrics,
    is_migrated: bool,
}

/// Returns the deadline of an operation that starts now.
pub fn deadline() -> Instant {
    Instant::now() + LIMIT
}

impl DriverClient {
    /// Creates a client that connects with its first call.
    pub fn new(driver: &str, socket: PathBuf, metrics: CsiMetrics) -> Self {
        Self { driver: driver.to_owned(), channel: berth_cri::socket_channel(socket), metrics, is_migrated: false }
    }

    /// Returns a client with the metrics labels of that volume.
    pub fn about(&self, spec: &VolumeSpec) -> Self {
        Self { is_migrated: spec.is_migrated, ..self.clone() }
    }

    fn rpc(&self) -> NodeClient<Channel> {
        NodeClient::new(self.channel.clone()).max_decoding_message_size(MESSAGE)
    }

    async fn call<T, A, F>(
        &self,
        method: &'static str,
        until: Instant,
        message: T,
        send: impl FnOnce(Request<T>) -> F,
    ) -> Result<A, CallError>
    where
        F: Future<Output = Result<Response<A>, Status>>,
    {
        let began = Instant::now();
        let mut request = Request::new(message);
        // Passes the deadline to the driver.
        request.set_timeout(until.saturating_duration_since(began));
        let done = match timeout_at(until, send(request)).await {
            Ok(done) => done.map(Response::into_inner).map_err(CallError::from),
            Err(_) => Err(CallError::late()),
        };
        let code = berth_cri::code_name(done.as_ref().err().map_or(Code::Ok, |error| error.code));
        let on = OperationTarget { plugin: &self.driver, is_migrated: self.is_migrated };
        self.metrics.ended(on, method, code, began.elapsed());
        done
    }

    /// Calls `NodeGetInfo`.
    pub async fn node_info(&self, until: Instant) -> Result<csi::NodeGetInfoResponse, CallError> {
        let (mut rpc, request) = (self.rpc(), csi::NodeGetInfoRequest {});
        self.call("/csi.v1.Node/NodeGetInfo", until, request, |r| async move { rpc.node_get_info(r).await }).await
    }

    /// Calls `NodeGetCapabilities`.
    pub async fn capabilities(&self, until: Instant) -> Result<Capabilities, CallError> {
        let (mut rpc, request) = (self.rpc(), csi::NodeGetCapabilitiesRequest {});
        let method = "/csi.v1.Node/NodeGetCapabilities";
        let answer = self.call(method, until, request, |r| async move { rpc.node_get_capabilities(r).await }).await?;
        Ok(Capabilities::of(&answer))
    }

    /// Calls `NodeStageVolume`.
    pub async fn stage(&self, until: Instant, request: csi::NodeStageVolumeRequest) -> Result<(), CallError> {
        let mut rpc = self.rpc();
        let method = "/csi.v1.Node/NodeStageVolume";
        self.call(method, until, request, |r| async move { rpc.node_stage_volume(r).await }).await.map(drop)
    }

    /// Calls `NodeUnstageVolume`.
    pub async fn unstage(&self, until: Instant, request: csi::NodeUnstageVolumeRequest) -> Result<(), CallError> {
        let mut rpc = self.rpc();
        let method = "/csi.v1.Node/NodeUnstageVolume";
        self.call(method, until, request, |r| async move { rpc.node_unstage_volume(r).await }).await.map(drop)
    }

    /// Calls `NodePublishVolume`.
    pub async fn publish(&self, until: Instant, request: csi::NodePublishVolumeRequest) -> Result<(), CallError> {
        let mut rpc = self.rpc();
        let method = "/csi.v1.Node/NodePublishVolume";
        self.call(method, until, request, |r| async move { rpc.node_publish_volume(r).await }).await.map(drop)
    }

    /// Calls `NodeUnpublishVolume`.
    pub async fn unpublish(&self, until: Instant, request: csi::NodeUnpublishVolumeRequest) -> Result<(), CallError> {
        let mut rpc = self.rpc();
        let method = "/csi.v1.Node/NodeUnpublishVolume";
        self.call(method, until, request, |r| async move { rpc.node_unpublish_volume(r).await }).await.map(drop)
    }

    /// Calls `NodeExpandVolume`; returns the size in bytes, 0 if the driver reports none.
    pub async fn expand(&self, until: Instant, request: csi::NodeExpandVolumeRequest) -> Result<i64, CallError> {
        let mut rpc = self.rpc();
        let method = "/csi.v1.Node/NodeExpandVolume";
        let answer = self.call(method, until, request, |r| async move { rpc.node_expand_volume(r).await }).await?;
        Ok(answer.capacity_bytes)
    }

    /// Calls `NodeGetVolumeStats`.
    pub async fn stats(
        &self,
        until: Instant,
        request: csi::NodeGetVolumeStatsRequest,
    ) -> Result<csi::NodeGetVolumeStatsResponse, CallError> {
        let mut rpc = self.rpc();
        let method = "/csi.v1.Node/NodeGetVolumeStats";
        self.call(method, until, request, |r| async move { rpc.node_get_volume_stats(r).await }).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attachable::Class;

    #[test]
    fn status_codes_distinguish_final_and_uncertain_errors() {
        // AC-07-17, AC-07-18
        for (code, class, trouble) in [
            (Code::Cancelled, Class::Uncertain, ErrorCause::Other),
            (Code::DeadlineExceeded, Class::Uncertain, ErrorCause::Other),
            (Code::Unavailable, Class::Uncertain, ErrorCause::Other),
            (Code::ResourceExhausted, Class::Uncertain, ErrorCause::Other),
            (Code::Aborted, Class::Uncertain, ErrorCause::Other),
            (Code::InvalidArgument, Class::Final, ErrorCause::Infeasible),
            (Code::NotFound, Class::Final, ErrorCause::Infeasible),
            (Code::OutOfRange, Class::Final, ErrorCause::Infeasible),
            (Code::FailedPrecondition, Class::Final, ErrorCause::InUse),
            (Code::Internal, Class::Final, ErrorCause::Other),
            (Code::Unknown, Class::Final, ErrorCause::Other),
            (Code::Unimplemented, Class::Final, ErrorCause::Other),
        ] {
            let error = CallError::from(Status::new(code, "x"));
            let op_error = error.about(error.to_string());
            assert_eq!((op_error.class, op_error.trouble), (class, trouble), "{code:?}");
        }
        let error = CallError::from(Status::internal("no such device"));
        assert_eq!(error.to_string(), "rpc error: code = Internal desc = no such device");
        assert!(!CallError::late().is_final());
    }

    #[test]
    fn capabilities_of_newer_drivers_are_left_out() {
        let rpc = |kind: i32| csi::NodeServiceCapability {
            r#type: Some(node_service_capability::Type::Rpc(node_service_capability::Rpc { r#type: kind })),
        };
        let none = csi::NodeServiceCapability { r#type: None };
        let answer = csi::NodeGetCapabilitiesResponse { capabilities: vec![rpc(1), rpc(3), rpc(4711), rpc(-1), none] };
        let expected = Capabilities { stages: true, expands: true, ..Capabilities::default() };
        assert_eq!(Capabilities::of(&answer), expected);
    }
}
