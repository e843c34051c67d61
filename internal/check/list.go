package check

import "context"

// Check is one look at the servers. It may rest on what the checks before it have learnt.
type Check struct {
	Name   string
	Doctor bool // only doctor makes it
	look   func(context.Context) Findings
}

// StartAndDoctor is a check that both make: a start ends where it finds an error.
func StartAndDoctor(name string, check func(context.Context) Findings) Check {
	return Check{Name: name, look: check}
}

// DoctorOnly is a check that a start does not make.
func DoctorOnly(name string, check func(context.Context) Findings) Check {
	return Check{Name: name, Doctor: true, look: check}
}

// List is the checks in their order.
type List []Check

// Start makes the checks of a start until one finds an error, and returns that.
func (l List) Start(ctx context.Context) error {
	for _, c := range l {
		if c.Doctor {
			continue
		}
		if err := c.look(ctx).FirstError(); err != nil {
			return err
		}
	}
	return nil
}

// All makes every check, and returns what they find as doctor prints it.
func (l List) All(ctx context.Context) Findings {
	var found Findings
	for _, c := range l {
		found = append(found, c.look(ctx)...)
	}
	return InOrder(found)
}
