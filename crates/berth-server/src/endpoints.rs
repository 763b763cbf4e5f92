//! Dispatch of routed requests to their handlers: one match arm per endpoint.

use std::{collections::BTreeMap, sync::Arc};

use axum::{
    body::Body,
    http::{Request, StatusCode, header},
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use futures::{FutureExt, future::BoxFuture};
use jiff::Timestamp;

use super::{
    auth::UserInfo,
    ports::{
        Checkpoints, ContainerLogs, DeviceList, Health, NodeLogs, PodDiagnostics, PodDirectory, Profiles, RunningPods,
        SnapshotPages, Statistics, TopologyMapSource, Verbosity,
    },
    routes::{
        attach, checkpoint, container_logs, devices, exec, flags_v, flagz, healthz, metrics, metrics_page, node_logs,
        port_forward, pprof, run, slis, stats_summary,
        statusz::{self, Statusz},
        text, topology, why,
    },
    routing::{Endpoint, PlainEndpoint},
    streaming::{CallerLimit, StreamingContext},
};
use berth_metrics::SliMetrics;

/// Parts of the agent behind the endpoints; shared by all listeners.
#[derive(Clone)]
pub struct Endpoints {
    /// Health checks.
    pub health: Arc<dyn Health>,
    /// Pages of `/pods` and `/metrics`.
    pub pages: Arc<dyn SnapshotPages>,
    /// Pods of `/runningpods/`.
    pub running: Arc<dyn RunningPods>,
    /// Container logs.
    pub logs: Arc<dyn ContainerLogs>,
    /// Limit of followed logs per caller.
    pub follows: Arc<CallerLimit>,
    /// Resource usage of the node, its pods, and their containers.
    pub statistics: Arc<dyn Statistics>,
    /// Feature gate `PodLogsQuerySplitStreams`.
    pub split_streams: bool,
    /// Body of `/configz`: the effective configuration.
    pub configz: Bytes,
    /// Debug endpoints.
    pub tools: Tools,
    /// Exec, attach, run, and port-forward.
    pub streams: StreamingContext,
}

/// Parts behind the debug endpoints.
#[derive(Clone)]
pub struct Tools {
    /// `/metrics/slis`
    pub slis: SliMetrics,
    /// `/statusz`
    pub statusz: Arc<Statusz>,
    /// Every flag and its value, with secrets masked.
    pub flags: Arc<BTreeMap<String, String>>,
    /// `/debug/flags/v`
    pub verbosity: Arc<dyn Verbosity>,
    /// `/logs/`
    pub node_logs: Arc<dyn NodeLogs>,
    /// `enableSystemLogQuery`
    pub log_queries: bool,
    /// `/debug/pprof/`
    pub profiles: Arc<dyn Profiles>,
    /// Pods assigned to this agent.
    pub pods: Arc<dyn PodDirectory>,
    /// `/checkpoint/`
    pub checkpoints: Arc<dyn Checkpoints>,
    /// `/debug/why/`
    pub why: Arc<dyn PodDiagnostics>,
    /// `/debug/devices`
    pub devices: Arc<dyn DeviceList>,
    /// `/debug/topology`
    pub topology: Arc<dyn TopologyMapSource>,
}

impl Endpoints {
    /// Calls a plain handler. Boxed, as is [`Self::service`], so that the futures of the handlers do not become part of
    /// the connection's future type.
    pub(super) fn plain(self: Arc<Self>, plain: PlainEndpoint, request: Request<Body>) -> BoxFuture<'static, Response> {
        async move { self.answer_plain(plain, request).await }.boxed()
    }

    /// Calls a handler of the service router.
    pub(super) fn service(self: Arc<Self>, endpoint: Endpoint, request: Request<Body>) -> BoxFuture<'static, Response> {
        async move { self.answer_service(endpoint, request).await }.boxed()
    }

    async fn answer_plain(&self, plain: PlainEndpoint, request: Request<Body>) -> Response {
        match plain {
            PlainEndpoint::Healthz => healthz::all(&*self.health, request.uri().query()),
            PlainEndpoint::HealthCheck(name) => healthz::one(&*self.health, &name),
            PlainEndpoint::Metrics => metrics::scrape(&*self.pages, request.headers()),
            PlainEndpoint::Configz => json(self.configz.clone()),
            PlainEndpoint::Disabled(text) => text::plain_error(StatusCode::METHOD_NOT_ALLOWED, text),
            PlainEndpoint::Slis => slis::serve(&self.tools.slis, self.pages.process_start(), &request),
            PlainEndpoint::Statusz => statusz::show(&self.tools.statusz, Timestamp::now(), request.headers()),
            PlainEndpoint::Flagz => flagz::show(&self.tools.flags, request.headers()),
            PlainEndpoint::Verbosity => flags_v::set(&*self.tools.verbosity, request).await,
            PlainEndpoint::Cadvisor => metrics_page::cadvisor(&*self.statistics, request.headers()).await,
            PlainEndpoint::Resource => metrics_page::resource(&*self.statistics, request.headers()).await,
            PlainEndpoint::Probes => metrics_page::probes(&*self.statistics, request.headers()).await,
        }
    }

    async fn answer_service(&self, endpoint: Endpoint, request: Request<Body>) -> Response {
        match endpoint {
            Endpoint::Pods => json_document(self.pages.pods()),
            Endpoint::RunningPods => match self.running.list().await {
                Ok(list) => json_document(list),
                Err(error) => {
                    text::coded(text::router_error(StatusCode::INTERNAL_SERVER_ERROR, &error), "runtime-error")
                }
            },
            Endpoint::ContainerLogs(path) => {
                let query = request.uri().query().map(str::to_owned);
                let caller = request.extensions().get::<UserInfo>().map(|who| who.name.clone()).unwrap_or_default();
                drop(request);
                let (query, caller, follows) = (query.as_deref(), caller.as_str(), &self.follows);
                let asked = container_logs::LogRequest { path: &path, query, caller, follows };
                container_logs::read(&self.logs, self.split_streams, asked).await
            }
            Endpoint::Summary => stats_summary::serve(&*self.statistics, request).await,
            Endpoint::Run(path) => run(&self.streams, &path, request).await,
            Endpoint::Exec(path) => exec(&self.streams, &path, request).await,
            Endpoint::Attach(path) => attach(&self.streams, &path, request).await,
            Endpoint::PortForward(path) => port_forward(&self.streams, &path, request).await,
            Endpoint::Checkpoint(path) => {
                let (pods, checkpoints) = (&*self.tools.pods, &*self.tools.checkpoints);
                let query = request.uri().query().unwrap_or_default().to_owned();
                drop(request);
                checkpoint::create(pods, checkpoints, checkpoint::ContainerRef::of(&path), &query).await
            }
            Endpoint::Logs(path) => {
                let head = request.map(drop);
                node_logs::read(&self.tools.node_logs, self.tools.log_queries, &head, &path).await
            }
            Endpoint::Why(path) => why::respond(&*self.tools.why, &path),
            Endpoint::Devices => devices::respond(&*self.tools.devices),
            Endpoint::Topology => topology::respond(&*self.tools.topology),
            Endpoint::Pprof(name) => pprof::serve(&*self.tools.profiles, &request.map(drop), &name).await,
        }
    }
}

fn json(body: Bytes) -> Response {
    ([(header::CONTENT_TYPE, "application/json"), (header::X_CONTENT_TYPE_OPTIONS, "nosniff")], body).into_response()
}

fn json_document(body: Bytes) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], body).into_response()
}
