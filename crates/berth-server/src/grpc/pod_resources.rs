//! PodResources gRPC services: devices, CPUs, and memory of each container (spec 04b §12).

use std::{sync::Arc, time::Duration};

use tokio::time::timeout;
use tonic::{
    Request, Response, Status, async_trait,
    service::{Routes, interceptor::InterceptedService},
};
use tracing::error;

use super::{RateLimit, health::health, pod_resources_conversion};
use crate::ports::{ExclusiveResources, PodDirectory};
use berth_metrics::{EndpointVersion, PodResourcesCall, PodResourcesMetrics};
use berth_proto::{
    pod_resources::{
        AllocatableResourcesRequest, AllocatableResourcesResponse, GetPodResourcesRequest, GetPodResourcesResponse,
        ListPodResourcesRequest, ListPodResourcesResponse, PodResources,
        pod_resources_lister_server::{PodResourcesLister, PodResourcesListerServer},
    },
    v1alpha1::{self, pod_resources_lister_server as alpha_server},
};
use berth_sys::grpc_deadline::Deadline;
use berth_types::Pod;

/// Timeout of the release of terminated pods' allocations before a list.
const RECONCILE: Duration = Duration::from_secs(5);

/// Dependencies of the services.
#[derive(Clone)]
pub struct PodResourcesDeps {
    /// Pods assigned to this agent.
    pub pods: Arc<dyn PodDirectory>,
    /// Exclusive allocations.
    pub exclusive: Arc<dyn ExclusiveResources>,
    /// Request metrics.
    pub metrics: PodResourcesMetrics,
    /// Whether version 1 lists only active pods (feature gate `KubeletPodResourcesListUseActivePods`).
    pub active_only: bool,
}

/// Service names for health checks.
const SERVICES: &[&str] = &["v1.PodResourcesLister", "v1alpha1.PodResourcesLister"];

/// Both versions of the service, with a shared rate limit, and the health service.
pub fn pod_resources(deps: PodResourcesDeps) -> Routes {
    let limit = RateLimit::default();
    let alpha_limit = limit.clone();
    let alpha = Deadline(alpha_server::PodResourcesListerServer::new(V1Alpha1(deps.clone())));
    let alpha = InterceptedService::new(alpha, move |request| alpha_limit.admit(request));
    let v1 = Deadline(PodResourcesListerServer::new(V1(deps)));
    let v1 = InterceptedService::new(v1, move |request| limit.admit(request));
    Routes::new(v1).add_service(alpha).add_service(health(SERVICES))
}

struct V1(PodResourcesDeps);

impl V1 {
    fn is_listed(&self, pod: &Pod) -> bool {
        !self.0.active_only || self.0.pods.is_active(pod)
    }

    fn of_pod(&self, pod: &Pod) -> PodResources {
        let exclusive = &self.0.exclusive;
        let containers = pod_resources_conversion::listed(pod).map(|container| {
            let claims = exclusive.claims(pod, &container.name).unwrap_or_else(|cause| {
                error!(pod = %pod.object_name(), containerName = %container.name, err = cause, "Failed to get resource claims of container");
                Vec::new()
            });
            pod_resources_conversion::container(&container.name, &exclusive.allocations(pod, &container.name), claims)
        });
        PodResources {
            name: pod.name().to_owned(),
            namespace: pod.namespace().to_owned(),
            containers: containers.collect(),
        }
    }
}

async fn reconcile(exclusive: &dyn ExclusiveResources) {
    if timeout(RECONCILE, exclusive.reconcile()).await.is_err() {
        error!("Timed out reconciling allocations, response may include resources of deleted pods");
    }
}

#[async_trait]
impl PodResourcesLister for V1 {
    async fn list(
        &self,
        _request: Request<ListPodResourcesRequest>,
    ) -> Result<Response<ListPodResourcesResponse>, Status> {
        self.0.metrics.requested(EndpointVersion::V1, PodResourcesCall::List);
        reconcile(&*self.0.exclusive).await;
        let pods = self.0.pods.pods();
        let listed = pods.iter().filter(|pod| self.is_listed(pod));
        Ok(Response::new(ListPodResourcesResponse { pod_resources: listed.map(|pod| self.of_pod(pod)).collect() }))
    }

    async fn get_allocatable_resources(
        &self,
        _request: Request<AllocatableResourcesRequest>,
    ) -> Result<Response<AllocatableResourcesResponse>, Status> {
        self.0.metrics.requested(EndpointVersion::V1, PodResourcesCall::GetAllocatable);
        let allocatable = self.0.exclusive.allocatable();
        Ok(Response::new(AllocatableResourcesResponse {
            devices: pod_resources_conversion::devices(&allocatable.devices),
            cpu_ids: pod_resources_conversion::cpus(&allocatable.cpus),
            memory: pod_resources_conversion::memory(&allocatable.memory),
        }))
    }

    async fn get(&self, request: Request<GetPodResourcesRequest>) -> Result<Response<GetPodResourcesResponse>, Status> {
        self.0.metrics.requested(EndpointVersion::V1, PodResourcesCall::Get);
        let GetPodResourcesRequest { pod_name, pod_namespace } = request.into_inner();
        match self.0.pods.find(&pod_namespace, &pod_name).filter(|pod| self.is_listed(pod)) {
            Some(pod) => Ok(Response::new(GetPodResourcesResponse { pod_resources: Some(self.of_pod(&pod)) })),
            None => {
                self.0.metrics.failed(PodResourcesCall::Get);
                Err(Status::unknown(format!("pod {pod_name} in namespace {pod_namespace} not found")))
            }
        }
    }
}

struct V1Alpha1(PodResourcesDeps);

#[async_trait]
impl alpha_server::PodResourcesLister for V1Alpha1 {
    async fn list(
        &self,
        _request: Request<v1alpha1::ListPodResourcesRequest>,
    ) -> Result<Response<v1alpha1::ListPodResourcesResponse>, Status> {
        let exclusive = &self.0.exclusive;
        self.0.metrics.requested(EndpointVersion::V1Alpha1, PodResourcesCall::List);
        reconcile(&**exclusive).await;
        let of_pod = |pod: &Arc<Pod>| v1alpha1::PodResources {
            name: pod.name().to_owned(),
            namespace: pod.namespace().to_owned(),
            containers: (pod.containers().iter())
                .map(|c| pod_resources_conversion::alpha_container(&c.name, &exclusive.allocations(pod, &c.name)))
                .collect(),
        };
        let pod_resources = self.0.pods.pods().iter().map(of_pod).collect();
        Ok(Response::new(v1alpha1::ListPodResourcesResponse { pod_resources }))
    }
}
