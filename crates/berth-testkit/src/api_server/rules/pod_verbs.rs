//! Pod subresources binding and eviction. Pure.
//!
//! Implements spec 10a §4.

use serde_json::{Value, json};

use super::{
    super::{
        refusal::{Cause, Refusal},
        view::{DeleteEffect, DeleteOptions, Reply, Request, View, Write},
    },
    deletion,
    fields::{fields, list, number, set, text, time},
};

/// Handles a Binding: assigns the pod to a node.
///
/// # Errors
/// 404; 409: bound already, or being deleted; 422: no node.
pub fn bind(view: &dyn View, request: &Request) -> Result<Reply, Refusal> {
    let binding = request.body.clone().unwrap_or_default();
    let name = if request.name.is_empty() { text(&binding, "/metadata/name") } else { &request.name };
    let old = view.get("pods", &request.namespace, name).ok_or_else(|| Refusal::not_found("pods", name))?;
    let node = text(&binding, "/target/name");
    if node.is_empty() {
        return Err(Refusal::invalid("Binding", name, vec![Cause::required("target.name", "")]));
    }
    let refuse = |why: &str| Err(Refusal::conflict("pods/binding", name, why));
    let wanted = text(&binding, "/metadata/uid");
    if !wanted.is_empty() && wanted != text(&old, "/metadata/uid") {
        let uid = text(&old, "/metadata/uid");
        return refuse(&format!("Precondition failed: UID in precondition: {wanted}, UID in object meta: {uid}"));
    }
    if old.pointer("/metadata/deletionTimestamp").is_some() {
        return refuse(&format!("pod {name} is being deleted, cannot be assigned to a host"));
    }
    match text(&old, "/spec/nodeName") {
        "" => {}
        other => return refuse(&format!("pod {name} is already assigned to node \"{other}\"")),
    }
    let mut pod = Value::clone(&old);
    set(&mut pod["spec"], "nodeName", node);
    for (key, value) in fields(&binding, "/metadata/annotations") {
        set(&mut pod["metadata"]["annotations"], key, value.clone());
    }
    let scheduled = json!({"type": "PodScheduled", "status": "True", "lastProbeTime": null, "lastTransitionTime": time(view.now()),
        "observedGeneration": number(&old, "/metadata/generation")});
    let others = list(&old, "/status/conditions").iter().filter(|c| text(c, "/type") != "PodScheduled").cloned();
    let conditions: Vec<Value> = others.chain([scheduled]).collect();
    set(&mut pod["status"], "conditions", conditions);
    Ok(success(vec![put(pod)]))
}

/// Handles an Eviction.
///
/// # Errors
/// 404; 409: a precondition fails; 429: a disruption budget forbids it.
pub fn evict(view: &dyn View, request: &Request) -> Result<Reply, Refusal> {
    let eviction = request.body.clone().unwrap_or_default();
    let name = &request.name;
    let old = view.get("pods", &request.namespace, name).ok_or_else(|| Refusal::not_found("pods", name))?;
    let option = |pointer: &str| Some(text(&eviction, pointer).to_owned()).filter(|value| !value.is_empty());
    let options = DeleteOptions {
        grace: number(&eviction, "/deleteOptions/gracePeriodSeconds"),
        uid: option("/deleteOptions/preconditions/uid"),
        resource_version: option("/deleteOptions/preconditions/resourceVersion"),
        propagation: option("/deleteOptions/propagationPolicy"),
    };
    deletion::check_preconditions("Pod", &old, &options)?;
    let is_over = ["Pending", "Succeeded", "Failed"].contains(&text(&old, "/status/phase"));
    let is_ending = old.pointer("/metadata/deletionTimestamp").is_some();
    let mut pod = Value::clone(&old);
    let mut writes = Vec::new();
    if !is_over && !is_ending {
        if view.rules().protected.contains(&format!("{}/{name}", request.namespace)) {
            let text = "Cannot evict pod as it would violate the pod's disruption budget.";
            let cause = Cause::new("DisruptionBudget", "", "The disruption budget needs more healthy pods");
            return Err(Refusal::new(429, "TooManyRequests", text).because(cause));
        }
        pod = deletion::evicting(&pod, view.now());
        writes.push(put(pod.clone()));
    }
    match deletion::pod(&pod, &options, view.now()) {
        DeleteEffect::Nothing => {}
        DeleteEffect::Update(pod) => writes.push(put(pod)),
        DeleteEffect::Remove(before) => {
            writes.extend(before.into_iter().map(put));
            let (namespace, name) = (request.namespace.clone(), name.clone());
            writes.push(Write::Remove { resource: "pods".to_owned(), namespace, name });
        }
    }
    Ok(success(writes))
}

fn put(object: Value) -> Write {
    Write::Put { resource: "pods".to_owned(), object }
}

fn success(writes: Vec<Write>) -> Reply {
    let body = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201});
    Reply { code: 201, body, writes }
}

#[cfg(test)]
mod tests {
    use super::{super::tests::FixedView, *};

    fn world(spec: Value, status: Value) -> FixedView {
        let pod = json!({"metadata": {"name": "p", "namespace": "a", "uid": "u", "generation": 1}, "spec": spec, "status": status});
        FixedView::with(&[("pods", pod)])
    }

    fn post(body: Value) -> Request {
        Request { namespace: "a".to_owned(), name: "p".to_owned(), body: Some(body), ..Request::default() }
    }

    fn objects(reply: &Reply) -> Vec<&Value> {
        reply
            .writes
            .iter()
            .filter_map(|write| if let Write::Put { object, .. } = write { Some(object) } else { None })
            .collect()
    }

    /// AC-10a-12: the generation stays.
    #[test]
    fn a_pod_is_bound_once() {
        let target = json!({"target": {"kind": "Node", "name": "n"}});
        let reply = bind(&world(json!({}), json!({"phase": "Pending"})), &post(target.clone())).expect("bound");
        assert_eq!((reply.code, text(&reply.body, "/status")), (201, "Success"));
        let pod = objects(&reply)[0];
        assert_eq!((&pod["spec"]["nodeName"], &pod["metadata"]["generation"]), (&json!("n"), &json!(1)));
        let condition = &pod["status"]["conditions"][0];
        assert_eq!(
            (&condition["type"], &condition["lastTransitionTime"]),
            (&json!("PodScheduled"), &json!("2026-01-01T00:00:00Z"))
        );
        let refusal =
            bind(&world(json!({"nodeName": "m"}), json!({})), &post(target.clone())).expect_err("bound already");
        let text = "Operation cannot be fulfilled on pods/binding \"p\": pod p is already assigned to node \"m\"";
        assert_eq!((refusal.code, refusal.message.as_str()), (409, text));
        assert_eq!(bind(&FixedView::with(&[]), &post(target)).expect_err("unknown").code, 404);
        assert_eq!(bind(&world(json!({}), json!({})), &post(json!({}))).expect_err("no node").code, 422);
    }

    /// Spec 10a §17 b1.
    #[test]
    fn an_eviction_sets_a_condition_and_deletes() {
        let running =
            || world(json!({"nodeName": "n", "terminationGracePeriodSeconds": 30}), json!({"phase": "Running"}));
        let reply = evict(&running(), &post(json!({}))).expect("evicted");
        let seen = objects(&reply);
        assert_eq!(seen.len(), 2);
        assert_eq!(seen[1]["status"]["conditions"][0]["reason"], "EvictionByEvictionAPI");
        assert_eq!(seen[1]["metadata"]["deletionGracePeriodSeconds"], 30);
        let pending = world(json!({}), json!({"phase": "Pending"}));
        let reply = evict(&pending, &post(json!({}))).expect("evicted");
        assert!(matches!(reply.writes.last(), Some(Write::Remove { .. })), "{:?}", reply.writes);
        let mut protected = running();
        protected.rules.protected.insert("a/p".to_owned());
        let refusal = evict(&protected, &post(json!({}))).expect_err("protected");
        assert_eq!((refusal.code, refusal.reason.as_str()), (429, "TooManyRequests"));
        let other = json!({"deleteOptions": {"preconditions": {"uid": "x"}}});
        assert_eq!(evict(&running(), &post(other)).expect_err("another").code, 409);
    }
}
