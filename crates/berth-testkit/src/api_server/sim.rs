//! Control API `/sim/v1/…` of a standalone test API server: act, inject faults, read the log.
//!
//! Clients act as user, controller, and network. Loopback only, without TLS. Implements spec 10a §1, §9, §10.
//!
//! ```text
//! GET    /sim/v1/requests?since=ID                 recorded requests, in order
//! GET    /sim/v1/connections
//! POST   /sim/v1/faults         {"effect":{"status":[503,"ServiceUnavailable","later"]},"verb":"patch","resource":"pods"}
//! GET    /sim/v1/faults/ID      number of hits
//! DELETE /sim/v1/faults[/ID]
//! POST   /sim/v1/bind           {"namespace":"default","pod":"web","node":"n1"}
//! POST   /sim/v1/certificates   {"name":"csr-x","decision":"approve"}     deny, fail
//! POST   /sim/v1/clock          {"seconds":3600}
//! POST   /sim/v1/network        {"state":"gone"}                          there, dark, light
//! POST   /sim/v1/restart        {"keepsEvents":true,"seconds":5}
//! POST   /sim/v1/compact        {"resource":"pods"}
//! ```

use std::{net::SocketAddr, sync::Arc, time::Duration};

use axum::{
    Router,
    body::Bytes,
    extract::{Path, Query, State},
    http::StatusCode,
    response::{IntoResponse, Response},
    routing::{delete, get, post},
};
use jiff::SignedDuration;
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Value, json};
use tokio::net::TcpListener;

use super::{ApiServer, Effect, Fault, FaultId, Ring, recorder::RecordedRequest};

type Server = State<Arc<ApiServer>>;

/// 400 response with the error as text.
struct BadRequest(String);

impl IntoResponse for BadRequest {
    fn into_response(self) -> Response {
        (StatusCode::BAD_REQUEST, format!("{}\n", self.0)).into_response()
    }
}

/// Serves the control API on a loopback port until the process exits.
///
/// # Panics
/// The port is in use.
pub async fn open(server: Arc<ApiServer>, port: u16) -> SocketAddr {
    let listener = TcpListener::bind(("127.0.0.1", port)).await.expect("failed to listen on the port");
    let address = listener.local_addr().expect("failed to get the local address");
    let router = Router::new()
        .route("/sim/v1/requests", get(requests))
        .route("/sim/v1/connections", get(connections))
        .route("/sim/v1/faults", post(add_fault).delete(clear_faults))
        .route("/sim/v1/faults/{id}", get(fault_hits).merge(delete(clear_fault)))
        .route("/sim/v1/bind", post(bind))
        .route("/sim/v1/certificates", post(certificates))
        .route("/sim/v1/clock", post(clock))
        .route("/sim/v1/network", post(network))
        .route("/sim/v1/restart", post(restart))
        .route("/sim/v1/compact", post(compact))
        .with_state(server);
    tokio::spawn(async move { axum::serve(listener, router).await });
    address
}

fn read<T: DeserializeOwned>(body: &Bytes) -> Result<T, BadRequest> {
    serde_json::from_slice(body).map_err(|error| BadRequest(error.to_string()))
}

fn done(value: &Value) -> Response {
    ([("content-type", "application/json")], format!("{value}\n")).into_response()
}

#[derive(Deserialize)]
struct Since {
    #[serde(default)]
    since: u64,
}

async fn requests(State(server): Server, Query(from): Query<Since>) -> Response {
    let log = server.log().since(from.since);
    done(&log.iter().map(|logged| request_json(logged)).collect())
}

fn request_json(logged: &RecordedRequest) -> Value {
    json!({
        "id": logged.id, "at": logged.at.to_string(), "connection": logged.connection, "alpn": logged.alpn,
        "serial": logged.serial, "user": logged.user, "userAgent": logged.agent(), "method": logged.method.as_str(),
        "path": logged.path, "verb": logged.verb, "resource": logged.resource, "subresource": logged.subresource,
        "namespace": logged.namespace, "name": logged.name, "body": logged.body, "code": logged.code,
        "resourceVersion": logged.rv, "bytes": logged.bytes, "events": logged.events, "end": logged.end,
        "fault": logged.fault,
    })
}

async fn connections(State(server): Server) -> Response {
    let open = server.connections();
    done(&open.iter().map(|connection| json!({"id": connection.id, "alpn": connection.alpn.get()})).collect())
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct FaultRequest {
    effect: EffectRequest,
    #[serde(default)]
    verb: String,
    #[serde(default)]
    resource: String,
    subresource: Option<String>,
    namespace: Option<String>,
    name: Option<String>,
    user: Option<String>,
    user_agent: Option<String>,
    connection: Option<u64>,
    #[serde(default)]
    skip: usize,
    /// Number of hits; absent: once; 0: until cleared.
    times: Option<usize>,
    chance: Option<f64>,
    #[serde(default)]
    after_commit: bool,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
enum EffectRequest {
    /// Delay in milliseconds.
    Delay(u64),
    Hang,
    Status(u16, String, String),
    /// `Retry-After` in seconds.
    TooMany(u32),
    Reset,
    Close,
    Goaway,
    Blackhole,
    CutBody(usize),
    Truncate(usize, usize),
    CutBeforeMarker,
    EndWatch(usize),
    Slow(usize),
}

impl From<EffectRequest> for Effect {
    fn from(happening: EffectRequest) -> Self {
        match happening {
            EffectRequest::Delay(milliseconds) => Self::Delay(Duration::from_millis(milliseconds)),
            EffectRequest::Hang => Self::Hang,
            EffectRequest::Status(code, reason, message) => Self::status(code, &reason, &message),
            EffectRequest::TooMany(seconds) => Self::too_many(seconds),
            EffectRequest::Reset => Self::Reset,
            EffectRequest::Close => Self::Close,
            EffectRequest::Goaway => Self::Goaway,
            EffectRequest::Blackhole => Self::Blackhole,
            EffectRequest::CutBody(bytes) => Self::CutBody(bytes),
            EffectRequest::Truncate(events, bytes) => Self::Truncate(events, bytes),
            EffectRequest::CutBeforeMarker => Self::CutBeforeMarker,
            EffectRequest::EndWatch(events) => Self::EndWatch(events),
            EffectRequest::Slow(bytes) => Self::Slow(bytes),
        }
    }
}

impl FaultRequest {
    fn fault(self) -> Result<Fault, BadRequest> {
        if let Some(Err(error)) = self.name.as_deref().map(regex_lite::Regex::new) {
            return Err(BadRequest(format!("name: {error}")));
        }
        let mut fault = Fault::new(self.effect.into()).on(&self.verb, &self.resource).skip(self.skip);
        type Part = fn(Fault, &str) -> Fault;
        let parts: [(Option<String>, Part); 5] = [
            (self.subresource, Fault::subresource),
            (self.namespace, Fault::namespace),
            (self.name, Fault::name),
            (self.user, Fault::user),
            (self.user_agent, Fault::agent),
        ];
        for (value, part) in parts {
            fault = value.into_iter().fold(fault, |fault, value| part(fault, &value));
        }
        fault = self.connection.into_iter().fold(fault, Fault::connection);
        fault = self.chance.into_iter().fold(fault, Fault::chance);
        fault = match self.times {
            Some(0) => fault.always(),
            Some(times) => fault.times(times),
            None => fault,
        };
        Ok(if self.after_commit { fault.after_commit() } else { fault })
    }
}

async fn add_fault(State(server): Server, body: Bytes) -> Result<Response, BadRequest> {
    let FaultId(id) = server.fault(read::<FaultRequest>(&body)?.fault()?);
    Ok(done(&json!({"id": id})))
}

async fn fault_hits(State(server): Server, Path(id): Path<u64>) -> Response {
    done(&json!({"id": id, "hits": server.hits(FaultId(id))}))
}

async fn clear_fault(State(server): Server, Path(id): Path<u64>) -> StatusCode {
    server.clear(FaultId(id));
    StatusCode::NO_CONTENT
}

async fn clear_faults(State(server): Server) -> StatusCode {
    server.clear_all();
    StatusCode::NO_CONTENT
}

async fn bind(State(server): Server, body: Bytes) -> Result<StatusCode, BadRequest> {
    #[derive(Deserialize)]
    struct Binding {
        namespace: String,
        pod: String,
        node: String,
    }
    let Binding { namespace, pod, node } = read(&body)?;
    let binding = json!({"kind": "Binding", "apiVersion": "v1", "metadata": {"name": pod, "namespace": namespace},
                         "target": {"kind": "Node", "apiVersion": "v1", "name": node}});
    let bound = server.admin().post_sub("pods", &namespace, &pod, "binding", binding);
    bound.map(|_| StatusCode::NO_CONTENT).map_err(|refusal| BadRequest(format!("{refusal:?}")))
}

async fn certificates(State(server): Server, body: Bytes) -> Result<StatusCode, BadRequest> {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    enum Decision {
        Approve,
        Deny,
        Fail,
    }
    #[derive(Deserialize)]
    struct DecisionRequest {
        name: String,
        decision: Decision,
        #[serde(default)]
        why: String,
    }
    let DecisionRequest { name, decision, why } = read(&body)?;
    if server.get("certificatesigningrequests.certificates.k8s.io", "", &name).is_none() {
        return Err(BadRequest(format!("certificate signing request {name:?} not found")));
    }
    match decision {
        Decision::Approve => server.approve(&name),
        Decision::Deny => server.deny(&name),
        Decision::Fail => server.fail(&name, &why),
    }
    Ok(StatusCode::NO_CONTENT)
}

async fn clock(State(server): Server, body: Bytes) -> Result<Response, BadRequest> {
    #[derive(Deserialize)]
    struct Jump {
        seconds: i32,
    }
    server.jump(SignedDuration::from_secs(read::<Jump>(&body)?.seconds.into()));
    Ok(done(&json!({"now": server.now().to_string()})))
}

async fn network(State(server): Server, body: Bytes) -> Result<StatusCode, BadRequest> {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    enum NetworkState {
        Gone,
        There,
        Dark,
        Light,
    }
    #[derive(Deserialize)]
    struct Network {
        state: NetworkState,
    }
    match read::<Network>(&body)?.state {
        NetworkState::Gone => server.take_offline().await,
        NetworkState::There => {
            server.take_offline().await; // its own port must be free
            server.bring_online().await;
        }
        NetworkState::Dark => server.set_black_hole(true),
        NetworkState::Light => server.set_black_hole(false),
    }
    Ok(StatusCode::NO_CONTENT)
}

async fn restart(State(server): Server, body: Bytes) -> Result<StatusCode, BadRequest> {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Restart {
        #[serde(default)]
        keeps_events: bool,
        #[serde(default)]
        seconds: u16,
    }
    let Restart { keeps_events, seconds } = read(&body)?;
    let ring = if keeps_events { Ring::Keep } else { Ring::Wipe };
    server.restart(ring, Duration::from_secs(seconds.into())).await;
    Ok(StatusCode::NO_CONTENT)
}

async fn compact(State(server): Server, body: Bytes) -> Result<StatusCode, BadRequest> {
    #[derive(Deserialize)]
    struct Compaction {
        resource: String,
    }
    server.compact(&read::<Compaction>(&body)?.resource, server.rv());
    Ok(StatusCode::NO_CONTENT)
}
