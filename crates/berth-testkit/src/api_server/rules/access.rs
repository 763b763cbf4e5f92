//! TokenReview and SubjectAccessReview handlers.
//!
//! Implements spec 10a §8.

use serde_json::{Value, json};

use super::{
    super::{
        refusal::{Cause, Refusal},
        view::{Caller, Reply, Request, View},
    },
    authentication::by_token,
    authorizer::{AccessAttributes, decide},
    fields::{fields, list, set, text, texts},
    tokens,
};

/// Handles a TokenReview.
///
/// # Errors
/// 400: there is no token.
pub fn token_review(view: &dyn View, request: &Request) -> Result<Reply, Refusal> {
    let body = request.body.clone().unwrap_or_default();
    let token = text(&body, "/spec/token");
    if token.is_empty() {
        return Err(Refusal::bad_request("token is required for TokenReview in authentication"));
    }
    let mut audiences = texts(&body, "/spec/audiences");
    if audiences.is_empty() {
        audiences.push(tokens::AUDIENCE.to_owned());
    }
    let status = match by_token(view, token, &audiences) {
        Ok((caller, audiences)) => {
            let mut user = json!({"username": caller.name, "groups": caller.groups});
            if !caller.uid.is_empty() {
                set(&mut user, "uid", caller.uid);
            }
            if !caller.extra.is_empty() {
                set(&mut user, "extra", json!(caller.extra));
            }
            json!({"authenticated": true, "user": user, "audiences": audiences})
        }
        Err(why) => json!({"authenticated": false, "user": {}, "error": why}),
    };
    Ok(answered(body, status))
}

/// Handles a SubjectAccessReview.
///
/// # Errors
/// 422: attributes or subject are missing.
pub fn subject_access_review(view: &dyn View, request: &Request) -> Result<Reply, Refusal> {
    let body = request.body.clone().unwrap_or_default();
    let spec = &body["spec"];
    let caller = Caller {
        name: text(spec, "/user").to_owned(),
        uid: text(spec, "/uid").to_owned(),
        groups: texts(spec, "/groups"),
        ..Caller::default()
    };
    let mut causes = Vec::new();
    if caller.name.is_empty() && caller.groups.is_empty() {
        causes.push(Cause::invalid("spec.user", &json!(""), "at least one of user or group must be specified"));
    }
    let asked = match (spec.get("resourceAttributes"), spec.get("nonResourceAttributes")) {
        (Some(attributes), None) => of_resource(attributes),
        (None, Some(attributes)) => AccessAttributes {
            verb: text(attributes, "/verb").to_owned(),
            resource: text(attributes, "/path").to_owned(),
            ..AccessAttributes::default()
        },
        _ => {
            let detail = "exactly one of nonResourceAttributes or resourceAttributes must be specified";
            causes.push(Cause::invalid("spec.resourceAttributes", &Value::Null, detail));
            AccessAttributes::default()
        }
    };
    if !causes.is_empty() {
        return Err(Refusal::invalid("SubjectAccessReview.authorization.k8s.io", "", causes));
    }
    let status = match decide(view, &caller, &asked) {
        Ok(()) => json!({"allowed": true, "reason": "RBAC: allowed"}),
        Err(why) if why.is_empty() => json!({"allowed": false}),
        Err(why) => json!({"allowed": false, "reason": why}),
    };
    Ok(answered(body, status))
}

fn of_resource(attributes: &Value) -> AccessAttributes {
    let (group, plural) = (text(attributes, "/group"), text(attributes, "/resource"));
    let selected = |key: &str| {
        let mut all = list(attributes, "/fieldSelector/requirements").iter();
        let one = all.find(|r| text(r, "/key") == key && text(r, "/operator") == "In" && list(r, "/values").len() == 1);
        one.map(|requirement| text(requirement, "/values/0").to_owned()).unwrap_or_default()
    };
    AccessAttributes {
        verb: text(attributes, "/verb").to_owned(),
        resource: if group.is_empty() { plural.to_owned() } else { format!("{plural}.{group}") },
        subresource: text(attributes, "/subresource").to_owned(),
        namespace: text(attributes, "/namespace").to_owned(),
        name: text(attributes, "/name").to_owned(),
        node_selector: selected("spec.nodeName"),
    }
}

fn answered(mut review: Value, status: Value) -> Reply {
    set(&mut review, "status", status);
    if fields(&review, "/metadata").next().is_none() {
        set(&mut review, "metadata", json!({"creationTimestamp": null}));
    }
    Reply { code: 201, body: review, writes: Vec::new() }
}

#[cfg(test)]
mod tests {
    use super::{super::tests::FixedView, *};

    #[test]
    fn a_review_asks_the_authorizers() {
        let mut view = FixedView::with(&[]);
        view.rules.grants.push(super::super::Grant::new("probe", &["get"], &["/metrics"]));
        view.rules.grants.push(super::super::Grant::new("probe", &["get"], &["nodes/proxy"]));
        let nodes = |subresource: &str| json!({"resourceAttributes": {"verb": "get", "resource": "nodes", "subresource": subresource, "name": "n"}});
        for (user, spec, expected) in [
            ("probe", nodes("proxy"), json!({"allowed": true, "reason": "RBAC: allowed"})),
            ("probe", nodes("stats"), json!({"allowed": false})),
            ("stranger", nodes("proxy"), json!({"allowed": false})),
            (
                "probe",
                json!({"nonResourceAttributes": {"verb": "get", "path": "/metrics"}}),
                json!({"allowed": true, "reason": "RBAC: allowed"}),
            ),
        ] {
            let mut spec = spec;
            set(&mut spec, "user", user);
            let request = Request { body: Some(json!({"spec": spec})), ..Request::default() };
            let reply = subject_access_review(&view, &request).expect("answered");
            assert_eq!((reply.code, &reply.body["status"]), (201, &expected), "{user}");
        }
        let nothing = Request { body: Some(json!({"spec": {"user": "x"}})), ..Request::default() };
        assert_eq!(subject_access_review(&view, &nothing).expect_err("asks nothing").code, 422);
    }
}
